"""The experts in plain torch against the layer by loops in float64."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch.nn.functional import gelu, linear, relu, silu

from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import TorchTopKWeightAndReduce, WeightAndReduceBy
from vllm_moe_modular.reference.moe_layer import moe_layer
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.fp8_rows import fp8_rows
from vllm_moe_modular.testing.fp8_weights import fp8_weights
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

EXPERTS, FINALIZE = WeightAndReduceBy.EXPERTS, WeightAndReduceBy.FINALIZE
SILU = Activation(kind=ActivationKind.SILU)
OAI = Activation(kind=ActivationKind.SWIGLU_OAI, limit=1.5, interleaved=True)
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """`why` is the test's id; `absent` the share of slots that have no expert here."""

    why: str
    activation: Activation = SILU
    R: int = 24
    K: int = 2
    E: int = 5
    H: int = 32
    F: int = 16
    bias: bool = False
    absent: float = 0.3
    weight_on_input: bool = False

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


CASES = [
    *(Case(why=kind.value, activation=Activation(kind=kind)) for kind in ActivationKind),
    Case(why="silu clamped", activation=Activation(kind=ActivationKind.SILU, limit=0.5)),
    Case(why="silu interleaved", activation=Activation(kind=ActivationKind.SILU, interleaved=True)),
    Case(why="gelu without a gate clamped", activation=Activation(kind=ActivationKind.GELU_NO_MUL, limit=0.5)),
    Case(why="gpt-oss", activation=OAI, bias=True),
    Case(why="swiglu_oai with its constants", activation=replace(OAI, alpha=1.2, beta=0.5, limit=None)),
    Case(why="bias", bias=True),
    Case(why="router weight on input of one expert", K=1, weight_on_input=True),
    Case(why="router weight on input of several experts", K=3, weight_on_input=True, bias=True),
    Case(why="one row", R=1, absent=0.0),
    Case(why="no row has an expert here", absent=1.0),
    Case(why="most experts have no rows", R=4, E=40, absent=0.0),
    Case(why="no experts on this rank", E=0, absent=1.0),
]


def make(case: Case, dtype: torch.dtype) -> tuple[StandardRows, ExpertWeights]:
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    width = 2 * case.F if case.activation.kind.is_gated else case.F
    ids = torch.randint(0, max(case.E, 1), (case.R, case.K), generator=g)
    absent = torch.rand(case.R, case.K, generator=g) < case.absent
    weights = torch.rand(case.R, case.K, generator=g).masked_fill(absent, NAN)
    rows = StandardRows(random(case.R, case.H).to(dtype), ids.masked_fill(absent, -1), weights)
    return rows, ExpertWeights(
        w13=(random(case.E, width, case.H) * case.H**-0.5).to(dtype),
        w2=(random(case.E, case.H, case.F) * case.F**-0.5).to(dtype),
        w13_bias=random(case.E, width).to(dtype) if case.bias else None,
        w2_bias=random(case.E, case.H).to(dtype) if case.bias else None,
    )


def run(case: Case, rows: StandardRows, weights: ExpertWeights, by: WeightAndReduceBy = EXPERTS) -> torch.Tensor:
    return TorchExperts(activation=case.activation).apply(
        rows, weights, workspace=(), weight_and_reduce_by=by, router_weight_on_input=case.weight_on_input
    )


def plain_torch(case: Case, rows: StandardRows, weights: ExpertWeights) -> torch.Tensor:
    """The obvious code, in the dtype of the rows."""
    out = torch.zeros_like(rows.x)
    for r, k in product(range(case.R), range(case.K)):
        e, weight = int(rows.topk_ids[r, k]), rows.topk_weights[r, k].to(rows.x.dtype)
        if e >= 0:
            bias13, bias2 = (None if b is None else b[e] for b in (weights.w13_bias, weights.w2_bias))
            x = rows.x[r] * weight if case.weight_on_input else rows.x[r]
            y = linear(plain_activation(linear(x, weights.w13[e], bias13), case.activation), weights.w2[e], bias2)
            out[r] += y if case.weight_on_input else y * weight
    return out


def plain_activation(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    kind, limit = activation.kind, activation.limit
    gate, up = (h[0::2], h[1::2]) if activation.interleaved else h.chunk(2)
    if not kind.is_gated:
        gate, up = h, torch.ones_like(h)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) if kind.is_gated else up
    if kind is ActivationKind.SWIGLU_OAI:
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    if kind is ActivationKind.RELU2_NO_MUL:
        return relu(gate) ** 2
    if kind in (ActivationKind.SILU, ActivationKind.SILU_NO_MUL):
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if kind is ActivationKind.GELU_TANH else "none") * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weighted_by_the_experts(case: Case, dtype: torch.dtype) -> None:
    rows, weights = make(case, dtype)
    before = rows.x.clone()
    out = run(case, rows, weights)
    truth = moe_layer(
        rows.x, rows.topk_ids, rows.topk_weights, weights, case.activation, router_weight_on_input=case.weight_on_input
    )
    assert out.dtype == dtype
    assert_as_accurate_as(out, plain_torch(case, rows, weights), truth)
    assert torch.equal(rows.x, before)


@pytest.mark.parametrize("case", [c for c in CASES if not c.weight_on_input], ids=str)
def test_weighted_by_finalize(case: Case) -> None:
    rows, weights = make(case, torch.float32)
    y = run(case, rows, weights, FINALIZE)
    assert y.shape == (case.R, case.K, case.H)
    out = torch.empty_like(rows.x)
    TorchTopKWeightAndReduce().apply(y, rows.topk_ids, rows.topk_weights, router_weight_on_input=False, out_RH=out)
    assert torch.allclose(out, run(case, rows, weights), atol=1e-5)


def test_weights_on_the_input_are_left_to_finalize_with_the_sum() -> None:
    """Who weights and reduces also scales the input: else both would."""
    case = Case(why="", weight_on_input=True)
    rows, weights = make(case, torch.float32)
    here = rows.topk_ids >= 0
    y = run(case, rows, weights, FINALIZE)
    assert torch.equal(y[here], run(replace(case, weight_on_input=False), rows, weights, FINALIZE)[here])


@pytest.mark.parametrize("by", [EXPERTS, FINALIZE], ids=lambda by: by.value)
def test_no_rows(by: WeightAndReduceBy) -> None:
    case = Case(why="", R=0)
    out = run(case, *make(case, torch.bfloat16), by)
    assert out.shape == ((0, case.H) if by is EXPERTS else (0, case.K, case.H))
    assert out.dtype == torch.bfloat16


def test_row_without_an_expert_is_not_read() -> None:
    case = Case(why="")
    rows, weights = make(case, torch.float32)
    nobody = (rows.topk_ids < 0).all(dim=1)
    assert nobody.any()
    rows.x[nobody] = NAN
    out = run(case, rows, weights)
    assert (out[nobody] == 0).all()
    assert out.isfinite().all()


def test_id_past_the_last_local_expert_adds_nothing() -> None:
    case = Case(why="", K=1, absent=0.0)
    rows, weights = make(case, torch.float32)
    rows.topk_ids[3] = case.E
    assert (run(case, rows, weights)[3] == 0).all()


def test_an_expert_named_twice_counts_twice() -> None:
    case = Case(why="", K=2, absent=0.0)
    rows, weights = make(case, torch.float32)
    rows.topk_ids[:, 1] = rows.topk_ids[:, 0]
    once = StandardRows(rows.x, rows.topk_ids[:, :1], rows.topk_weights.sum(dim=1, keepdim=True))
    assert torch.allclose(run(case, rows, weights), run(replace(case, K=1), once, weights), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [SILU, OAI], ids=["silu", "interleaved"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "channels"])
def test_weights_in_fp8(blocks: bool, activation: Activation, dtype: torch.dtype) -> None:
    case = Case(why="", H=200, F=144, activation=activation, bias=True)
    rows, plain = make(case, dtype)
    w13, w13_scale = (torch.stack(t) for t in zip(*(fp8_weights(w, blocks=blocks) for w in plain.w13), strict=True))
    w2, w2_scale = (torch.stack(t) for t in zip(*(fp8_weights(w, blocks=blocks) for w in plain.w2), strict=True))
    weights = replace(plain, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
    meant = replace(
        plain,
        w13=torch.stack([dequantized(w, s, dtype) for w, s in zip(w13, w13_scale, strict=True)]),
        w2=torch.stack([dequantized(w, s, dtype) for w, s in zip(w2, w2_scale, strict=True)]),
    )
    truth = moe_layer(rows.x, rows.topk_ids, rows.topk_weights, weights, activation)
    assert_as_accurate_as(run(case, rows, weights), plain_torch(case, rows, meant), truth)


@pytest.mark.parametrize("by", [EXPERTS, FINALIZE], ids=["experts", "finalize"])
def test_rows_in_fp8_are_what_they_stand_for(by: WeightAndReduceBy) -> None:
    case = Case(why="", H=256)
    rows, weights = make(case, torch.bfloat16)
    quantised = fp8_rows(rows)
    meant = replace(rows, x=dequantize_fp8(*quantize_fp8(rows.x)).float().bfloat16())
    got, want = (run(case, given, weights, by) for given in (quantised, meant))
    assert got.dtype == torch.bfloat16
    here = rows.topk_ids >= 0
    assert torch.equal(got, want) if by is EXPERTS else torch.equal(got[here], want[here])


def test_weights_in_fp8_without_scales_are_refused() -> None:
    case = Case(why="")
    rows, weights = make(case, torch.float32)
    with pytest.raises(UnsupportedError, match=r"w13 in torch\.float8_e4m3fn without w13_scale in the torch experts"):
        run(case, rows, replace(weights, w13=weights.w13.to(torch.float8_e4m3fn)))


def test_hidden_size_of_the_weights_is_checked() -> None:
    case = Case(why="")
    rows, weights = make(case, torch.float32)
    narrow = StandardRows(rows.x[:, :7], rows.topk_ids, rows.topk_weights)
    with pytest.raises(ShapeError, match=r"x: expected shape \[R=24, H=32\], got \[24, 7\]"):
        run(case, narrow, weights)


def test_batched_rows_are_refused() -> None:
    case = Case(why="")
    _, weights = make(case, torch.float32)
    rows = BatchedRows(torch.zeros(5, 4, 32), torch.zeros(5, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="batched format in the torch experts"):
        TorchExperts(activation=SILU).apply(
            rows, weights, workspace=(), weight_and_reduce_by=EXPERTS, router_weight_on_input=False
        )


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"topk_ids": torch.zeros(2, 3, dtype=torch.int32)},
            ShapeError,
            r"topk_ids in the torch .*R=5, K=3.*2, 3",
        ),
        ({"topk_weights": torch.zeros(4, 3)}, ShapeError, r"topk_weights in the torch .*R=5, K=3.*4, 3"),
        ({"out_dtype": torch.float8_e4m3fn}, UnsupportedError, r"out_dtype torch.float8_e4m3fn in the torch"),
        ({"out_dtype": torch.int32}, UnsupportedError, r"out_dtype torch.int32 in the torch"),
    ],
    ids=["ids of other rows", "weights of other rows", "fp8 results", "integer results"],
)
def test_routing_that_does_not_fit_the_rows_is_refused(
    wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    rows, weights = make(Case(why="", R=5, K=3), torch.float32)
    with pytest.raises(error, match=message):
        run(Case(why=""), replace(rows, **wrong), weights)  # type: ignore[arg-type]

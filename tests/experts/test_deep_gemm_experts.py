"""experts.deep_gemm_experts as a whole: against float64, then each property that has a name.

Over the installed DeepGEMM where there is one, else over a stand-in in plain torch.
"""

from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch

from tests.experts import deep_gemm_stand_in
from tests.kernels.common import DEVICE, poisoned, randn, random_ids
from tests.kernels.interpreter import rounds_to_nearest  # noqa: F401
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.deep_gemm_library import DeepGemm, load_deep_gemm
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.fp8_rows import fp8_rows
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = Activation(kind=ActivationKind.SILU)
GELU = Activation(kind=ActivationKind.GELU)
OAI = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def library() -> DeepGemm:
    if DEVICE.type == "cuda":
        try:
            return load_deep_gemm()
        except UnsupportedError:
            pass
    return DeepGemm(deep_gemm_stand_in)


def experts(activation: Activation = SILU) -> DeepGemmExperts:
    return DeepGemmExperts(activation, library=library())


@pytest.fixture
def real() -> None:
    """For what the stand-in cannot show."""
    try:
        load_deep_gemm()
    except UnsupportedError as why:
        pytest.skip(str(why))


@dataclass(frozen=True)
class Case:
    """One shape of weights serves all cases: DeepGEMM compiles for each."""

    why: str
    R: int
    K: int = 3
    E: int = 12
    H: int = 256
    F: int = 128
    activation: Activation = SILU
    weight_on_input: bool = False
    ids_dtype: torch.dtype = torch.int32
    same_expert_twice: bool = False

    def __str__(self) -> str:
        return self.why

    def problem(self, dtype: torch.dtype) -> tuple[StandardRows, ExpertWeights]:
        ids = random_ids(self.R, self.K, self.E).to(self.ids_dtype)
        if self.same_expert_twice:
            ids[:, -1] = ids[:, 0]
        rows = StandardRows(
            x=randn(self.R, self.H, dtype=BF16),
            topk_ids=ids,
            topk_weights=randn(self.R, self.K, dtype=torch.float32, seed=1).abs(),
        )
        w13 = randn(self.E, 2 * self.F, self.H, dtype=BF16, seed=2) / self.H**0.5
        w2 = randn(self.E, self.H, self.F, dtype=BF16, seed=3) / self.F**0.5
        if dtype == BF16:
            return rows, ExpertWeights(w13=w13, w2=w2)
        (q13, s13), (q2, s2) = quantize_blocks(w13), quantize_blocks(w2)
        return rows, ExpertWeights(w13=q13, w2=q2, w13_scale=s13, w2_scale=s2)


CASES = [
    Case("one row", R=1),
    Case("top 3 of 12", R=25),
    Case("one expert, int64 ids", R=20, K=1, ids_dtype=torch.int64),
    Case("top 8", R=12, K=8),
    Case("an expert twice in a row", R=20, same_expert_twice=True),
    Case("weight on input", R=20, K=1, activation=GELU, weight_on_input=True),
    Case("gates and ups in turns, clamped", R=20, activation=OAI),
]


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K] in blocks of 128 x 128, N and K multiples of it."""
    blocks = w.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scale = blocks.abs().amax((2, 4)) / 448
    return (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2).to(FP8), scale


def plain(w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if scale is None:
        return w.to(dtype)
    blocks = w.to(dtype).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    return (blocks * scale.to(dtype)[:, :, None, :, None]).flatten(3).flatten(1, 2)


def reference(rows: StandardRows, weights: ExpertWeights, case: Case, *, truth: bool) -> torch.Tensor:
    """Expert by expert: in float64, or as one would in plain torch, quantised where the weights are."""
    a = case.activation
    activation = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    quantized = weights.w13_scale is not None
    dtype = torch.float64 if truth else torch.float32 if quantized else BF16
    w13, w2 = plain(weights.w13, weights.w13_scale, dtype), plain(weights.w2, weights.w2_scale, dtype)

    def multiplied(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        t = dequantize_fp8(*quantize_fp8(t)).to(dtype) if quantized and not truth else t
        y = t @ w.T
        return y if truth else y.to(BF16)

    E, H, _ = w2.shape
    out = torch.zeros(rows.x.shape[0], H, dtype=torch.float64 if truth else BF16, device=DEVICE)
    for e in range(E):
        r, k = (rows.topk_ids == e).nonzero(as_tuple=True)
        if not r.numel():
            continue
        weight = rows.topk_weights[r, k, None].to(out.dtype)
        gate_up = multiplied(rows.x[r].to(dtype), w13[e])
        y = multiplied(activation(gate_up * weight if case.weight_on_input else gate_up).to(dtype), w2[e])
        out.index_put_((r,), (y if case.weight_on_input else y * weight).to(out.dtype), accumulate=True)
    return out


def run(
    rows: StandardRows, weights: ExpertWeights, part: DeepGemmExperts, *, weight_on_input: bool = False
) -> torch.Tensor:
    workspace = [
        torch.full(s.shape, 0xFF if s.dtype == torch.uint8 else -(2**30), dtype=s.dtype, device=DEVICE)
        for s in part.workspace(rows, weights)
    ]
    return part.apply(
        rows, weights, workspace=workspace, weight_and_reduce_by=WeightAndReduceBy.EXPERTS,
        router_weight_on_input=weight_on_input,
    )  # fmt: skip


both = pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    rows, weights = case.problem(dtype)
    got = run(rows, weights, experts(case.activation), weight_on_input=case.weight_on_input)
    naive, truth = (reference(rows, weights, case, truth=t) for t in (False, True))
    assert_as_accurate_as(got, naive, truth)


@both
def test_garbage_behind_ids_that_are_not_here(dtype: torch.dtype) -> None:
    case = Case("", R=21)
    rows, weights = case.problem(dtype)
    rows.topk_ids[0, 0], rows.topk_weights[0, 0] = -1, float("nan")
    rows.topk_ids[-1, 1], rows.topk_weights[-1, 1] = case.E, float("nan")
    naive, truth = (reference(rows, weights, case, truth=t) for t in (False, True))
    assert_as_accurate_as(run(rows, weights, experts()), naive, truth)


@both
def test_rows_without_an_expert_are_zero(dtype: torch.dtype) -> None:
    rows, weights = Case("", R=21).problem(dtype)
    rows.topk_ids[:] = -1
    rows.x[:], rows.topk_weights[:] = float("nan"), float("nan")
    assert not run(rows, weights, experts()).any()


@both
def test_padding_rows_change_nothing(dtype: torch.dtype) -> None:
    """An all-to-all hands over its whole buffer: what follows the real rows is uninitialised."""
    rows, weights = Case("", R=8).problem(dtype)
    padded = StandardRows(
        x=torch.cat([rows.x, poisoned(30, 256, dtype=BF16)]),
        topk_ids=torch.cat([rows.topk_ids, torch.full((30, 3), -1, dtype=torch.int32, device=DEVICE)]),
        topk_weights=torch.cat([rows.topk_weights, poisoned(30, 3, dtype=torch.float32)]),
    )
    assert torch.equal(run(padded, weights, experts())[:8], run(rows, weights, experts()))


@both
def test_more_rows_of_an_expert_than_a_block(dtype: torch.dtype) -> None:
    case = Case("", R=150, K=1)
    rows, weights = case.problem(dtype)
    rows.topk_ids[:] = 5
    naive, truth = (reference(rows, weights, case, truth=t) for t in (False, True))
    assert_as_accurate_as(run(rows, weights, experts()), naive, truth)


@both
def test_no_rows(dtype: torch.dtype) -> None:
    rows, weights = Case("", R=1).problem(dtype)
    none = StandardRows(rows.x[:0], rows.topk_ids[:0], rows.topk_weights[:0])
    assert run(none, weights, experts()).shape == (0, 256)


@both
def test_no_experts_on_this_rank(dtype: torch.dtype) -> None:
    rows, weights = Case("", R=5).problem(dtype)
    rows.topk_ids[:] = -1
    nobody = {f.name: value[:0] for f in fields(weights) if (value := getattr(weights, f.name)) is not None}
    out = run(rows, ExpertWeights(**nobody), experts())
    assert out.shape == (5, 256)
    assert not out.any()


@both
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    rows, weights = Case("", R=16).problem(dtype)
    part = StandardRows(rows.x[-5:], rows.topk_ids[-5:], rows.topk_weights[-5:])
    assert torch.equal(run(part, weights, experts()), run(rows, weights, experts())[-5:])


@both
def test_rows_of_a_wider_tensor(dtype: torch.dtype) -> None:
    rows, weights = Case("", R=8).problem(dtype)
    wide = torch.cat([rows.x, rows.x], dim=1)[:, :256]
    assert torch.equal(run(replace(rows, x=wide), weights, experts()), run(rows, weights, experts()))


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous scales", "scales of a group side by side"])
def test_rows_that_come_in_fp8_give_the_bits_of_rows_that_are_quantised_here(strided: bool) -> None:
    rows, weights = Case("", R=21).problem(FP8)
    rows.topk_ids[0, 0], rows.topk_ids[4] = -1, -1
    quantised = fp8_rows(rows)
    assert quantised.x_scale is not None
    if strided:
        quantised = replace(quantised, x_scale=quantised.x_scale.T.contiguous().T)
    got = run(quantised, weights, experts())
    assert got.dtype == BF16
    assert torch.equal(got, run(rows, weights, experts()))


def test_refuses_rows_in_fp8_with_unquantised_weights() -> None:
    rows, weights = Case("", R=3).problem(BF16)
    with pytest.raises(UnsupportedError, match="rows in fp8 with unquantised weights in the deep_gemm experts"):
        run(fp8_rows(rows), weights, experts())


@both
def test_the_first_call_compiles_for_fewer_rows_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    part, used = experts(), []
    gemm = part._library.grouped_gemm
    monkeypatch.setattr(
        part._library, "grouped_gemm", lambda *a, **k: (used.append(k["expected_rows"]), gemm(*a, **k)), raising=False
    )
    rows, weights = Case("", R=20).problem(dtype)
    run(rows, weights, part)
    assert used == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    run(StandardRows(rows.x[:1], rows.topk_ids[:1], rows.topk_weights[:1]), weights, part)
    assert used[10:] == [1, 1]


@both
def test_workspace_is_no_larger_than_vllms(dtype: torch.dtype) -> None:
    """vLLM's: two buffers, bfloat16 and as many rows; F or H columns, 2F or H columns; and the result."""
    rows, weights = Case("", R=512).problem(dtype)
    P = 512 * 3 + 12 * 127
    vllm = 2 * (P * max(128, 256) + P * 256 + 512 * 256)
    assert sum(s.nbytes for s in experts().workspace(rows, weights) if s.dtype == torch.uint8) <= vllm


def test_refuses_by_name() -> None:
    with pytest.raises(UnsupportedError, match="silu_no_mul"):
        experts(Activation(kind=ActivationKind.SILU_NO_MUL))
    rows, weights = Case("", R=1).problem(BF16)
    with pytest.raises(UnsupportedError, match="batched format"):
        experts().workspace(BatchedRows(rows.x[None], torch.ones(1, dtype=torch.int32)), weights)


def test_refuses_weights_that_do_not_fit() -> None:
    rows, weights = Case("", R=1).problem(BF16)
    quantized = Case("", R=1).problem(FP8)[1]
    with pytest.raises(ShapeError, match="w13: expected shape"):
        run(rows, replace(weights, w13=weights.w13[:, 2:]), experts())
    with pytest.raises(ShapeError, match="x: expected shape"):
        run(replace(rows, x=rows.x[:, 1:]), weights, experts())
    for refused, says in (
        (replace(weights, w13=weights.w13.half()), r"w13 in torch\.float16"),
        (replace(weights, w2=weights.w2.mT.contiguous().mT), "w2 with strides"),
        (replace(weights, w2_bias=weights.w2[:, :, 0]), "a bias"),
        (replace(quantized, w2_scale=None), "w2 in .* with scales none"),
        (replace(quantized, w13_scale=torch.ones(12, 256, device=DEVICE)), r"scales torch\.float32 \[12, 256\]"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            run(rows, refused, experts())
    with pytest.raises(UnsupportedError, match=r"rows in torch\.float16"):
        run(replace(rows, x=rows.x.half()), weights, experts())


@pytest.mark.parametrize(("dtype", "F", "multiple"), [(BF16, 96, 64), (FP8, 192, 128)], ids=["bf16", "fp8"])
def test_refuses_a_size_that_deep_gemm_does_not_take(dtype: torch.dtype, F: int, multiple: int) -> None:
    rows, weights = Case("", R=1, F=F).problem(BF16)
    weights = ExpertWeights(w13=weights.w13.to(dtype), w2=weights.w2.to(dtype))
    with pytest.raises(UnsupportedError, match=f"intermediate size {F} .* takes multiples of {multiple}"):
        run(rows, weights, experts())


@pytest.mark.gpu
@pytest.mark.usefixtures("real")
@both
@pytest.mark.parametrize("R", [1, 32, 1000])
def test_replays_in_a_cuda_graph_with_other_ids(R: int, dtype: torch.dtype) -> None:
    case = Case("", R=R)
    rows, weights = case.problem(dtype)
    part = experts()
    run(rows, weights, part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(rows, weights, part)
    rows.topk_ids.copy_(random_ids(R, 3, 12, seed=7))
    rows.topk_ids[0, 0] = -1
    graph.replay()
    assert torch.equal(got, run(rows, weights, part))
    naive, truth = (reference(rows, weights, case, truth=t) for t in (False, True))
    assert_as_accurate_as(got, naive, truth)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"topk_ids": torch.zeros(2, 3, dtype=torch.int32)},
            ShapeError,
            r"topk_ids in the deep_gemm .*R=5, K=3.*2, 3",
        ),
        ({"topk_weights": torch.zeros(4, 3)}, ShapeError, r"topk_weights in the deep_gemm .*R=5, K=3.*4, 3"),
        (
            {"out_dtype": torch.float8_e4m3fn},
            UnsupportedError,
            r"out_dtype torch.float8_e4m3fn in the deep_gemm",
        ),
        ({"out_dtype": torch.int32}, UnsupportedError, r"out_dtype torch.int32 in the deep_gemm"),
    ],
    ids=["ids of other rows", "weights of other rows", "fp8 results", "integer results"],
)
def test_routing_that_does_not_fit_the_rows_is_refused(
    wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    rows, weights = Case("", R=5, K=3).problem(BF16)
    with pytest.raises(error, match=message):
        run(replace(rows, **wrong), weights, experts())  # type: ignore[arg-type]

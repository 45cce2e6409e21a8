"""Experts of the batched format with weights in fp8: Triton's; DeepGEMM's over the installed one, else a stand-in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.experts import deep_gemm_stand_in
from tests.kernels.common import DEVICE, poisoned, randn, random_fp8_weights, stand_for
from tests.kernels.interpreter import multiplies_each_row_alone, rounds_to_nearest  # noqa: F401
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.deep_gemm_batched_experts import DeepGemmBatchedExperts
from vllm_moe_modular.experts.deep_gemm_library import DeepGemm, load_deep_gemm
from vllm_moe_modular.experts.triton_batched_experts import TritonBatchedExperts
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.fp8_rows import fp8_rows
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = Activation(kind=ActivationKind.SILU)
GPT_OSS = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
FINALIZE = WeightAndReduceBy.FINALIZE
FIXED_TILES = GemmTiles(16, gated=GemmTile(128, 128, 1, 4, 2), down=GemmTile(128, 128, 1, 4, 2))

Make = Callable[[Activation], PermuteExpertsUnpermute]


def library() -> DeepGemm:
    if DEVICE.type == "cuda":
        try:
            return load_deep_gemm()
        except UnsupportedError:
            pass
    return DeepGemm(deep_gemm_stand_in)


def triton(activation: Activation) -> TritonBatchedExperts:
    return TritonBatchedExperts(activation)


def deep_gemm(activation: Activation) -> DeepGemmBatchedExperts:
    return DeepGemmBatchedExperts(activation, library=library())


@dataclass(frozen=True)
class Case:
    why: str
    counts: tuple[int, ...] = (0, 3, 16, 1)
    C: int = 16
    H: int = 256
    F: int = 128
    blocks: bool = True
    activation: Activation = SILU
    bias: bool = False

    def problem(self, dtype: torch.dtype) -> tuple[BatchedRows, ExpertWeights]:
        """Rows behind the counts are NaN."""
        E = len(self.counts)
        x = poisoned(E, self.C, self.H, dtype=dtype)
        for e, count in enumerate(self.counts):
            x[e, :count] = randn(count, self.H, dtype=dtype, seed=e)
        w13, w13_scale = random_fp8_weights(E, 2 * self.F, self.H, blocks=self.blocks, seed=50)
        w2, w2_scale = random_fp8_weights(E, self.H, self.F, blocks=self.blocks, seed=51)
        weights = ExpertWeights(
            w13=w13,
            w2=w2,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            w13_bias=randn(E, 2 * self.F, dtype=dtype, seed=52) if self.bias else None,
            w2_bias=randn(E, self.H, dtype=dtype, seed=53) if self.bias else None,
        )
        return BatchedRows(x, torch.tensor(self.counts, dtype=torch.int32, device=DEVICE)), weights

    def __str__(self) -> str:
        return self.why


BOTH = [
    Case("empty, ragged and full blocks of rows"),
    Case("as many rows as a tile of DeepGEMM, and one more", counts=(128, 129, 0), C=256),
    Case("nobody has rows", counts=(0, 0)),
    Case("no room for rows", counts=(0, 0), C=0),
]
TRITON = [
    *BOTH,
    Case("channels", blocks=False),
    Case("channels, gpt-oss", H=72, F=40, blocks=False, activation=GPT_OSS, bias=True),
    Case("channels, rows of no multiple of 16 bytes", C=7, counts=(7, 0, 2), H=66, F=38, blocks=False),
    Case("blocks, biases, last one of depth partial", H=200, bias=True),
    Case("blocks, many rows per expert", C=300, counts=(150, 31)),
]
DEEP_GEMM = [*BOTH, Case("gates and ups in turns, clamped", activation=GPT_OSS)]


def run(rows: BatchedRows, weights: ExpertWeights, experts: PermuteExpertsUnpermute) -> torch.Tensor:
    workspace = [
        torch.full(s.shape, 0xFF, dtype=s.dtype, device=DEVICE)
        if s.dtype == torch.uint8
        else poisoned(*s.shape, dtype=s.dtype)
        for s in experts.workspace(rows, weights)
    ]
    return experts.apply(
        rows, weights, workspace=workspace, weight_and_reduce_by=FINALIZE, router_weight_on_input=False
    )


def real(t_ECH: torch.Tensor, case: Case) -> torch.Tensor:
    return torch.cat([t_ECH[e, :count] for e, count in enumerate(case.counts)])


def reference(
    rows: BatchedRows, weights: ExpertWeights, case: Case, dtype: torch.dtype, *, quantise_rows: bool
) -> torch.Tensor:
    """Of the real rows, in `dtype`, over what the weights stand for."""
    a = case.activation
    activate = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None

    def on_the_way(x: torch.Tensor) -> torch.Tensor:
        return dequantize_fp8(*quantize_fp8(x)).to(dtype) if quantise_rows else x.to(dtype)

    w13, w2 = stand_for(weights.w13, weights.w13_scale, dtype), stand_for(weights.w2, weights.w2_scale, dtype)
    b13, b2 = (None if b is None else b.to(dtype) for b in (weights.w13_bias, weights.w2_bias))
    ys = []
    for e, count in enumerate(case.counts):
        h = on_the_way(rows.x[e, :count]) @ w13[e].T
        y = on_the_way(activate(h if b13 is None else h + b13[e])) @ w2[e].T
        ys.append(y if b2 is None else y + b2[e])
    return torch.cat(ys)


def in_all_layouts(rows: BatchedRows) -> list[BatchedRows]:
    """In fp8; the scales in rows, side by side by group, and as columns of a wider tensor."""
    quantised = fp8_rows(rows)
    assert quantised.x_scale is not None
    scale = quantised.x_scale
    return [
        quantised,
        replace(quantised, x_scale=scale.transpose(1, 2).contiguous().transpose(1, 2)),
        replace(quantised, x_scale=torch.cat([scale, scale], dim=2)[:, :, : scale.shape[2]]),
    ]


@pytest.mark.parametrize(
    ("make", "case", "dtype"),
    [
        *(pytest.param(triton, case, torch.float16, id=f"triton, {case}") for case in TRITON),
        *(pytest.param(deep_gemm, case, torch.bfloat16, id=f"deep_gemm, {case}") for case in DEEP_GEMM),
    ],
)
def test_matches_float64_and_quantising_before_changes_no_bit(make: Make, case: Case, dtype: torch.dtype) -> None:
    rows, weights = case.problem(dtype)
    experts = make(case.activation)
    got = run(rows, weights, experts)
    assert got.shape == rows.x.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    naive = reference(rows, weights, case, dtype, quantise_rows=True)
    assert_as_accurate_as(real(got, case), naive, reference(rows, weights, case, torch.float64, quantise_rows=False))
    got = got.clone()
    for given in in_all_layouts(rows) if case.H % 128 == 0 else []:
        again = run(given, weights, experts)
        assert again.dtype == dtype
        assert torch.equal(real(again, case), real(got, case))


@pytest.mark.usefixtures("multiplies_each_row_alone")
@pytest.mark.parametrize("in_fp8", [False, True], ids=["rows as they are", "rows in fp8"])
@pytest.mark.parametrize("make", [triton, deep_gemm])
def test_a_row_does_not_depend_on_its_neighbours(make: Make, in_fp8: bool) -> None:
    many, weights = Case("", counts=(16, 16)).problem(torch.bfloat16)
    few, _ = Case("", counts=(16, 1)).problem(torch.bfloat16)
    experts = TritonBatchedExperts(SILU, tiles=FIXED_TILES) if make is triton else make(SILU)
    if DEVICE.type == "cpu" and make is triton:  # its products of the interpreter are for float16
        many, few = (replace(r, x=r.x.half()) for r in (many, few))
    if in_fp8:
        many, few = fp8_rows(many), fp8_rows(few)
    assert torch.equal(run(few, weights, experts)[1, 0], run(many, weights, experts)[1, 0])


def test_scratch_memory_of_triton_is_no_larger_than_unquantised() -> None:
    rows, weights = Case("", C=64, counts=(1, 2, 3, 4)).problem(torch.float16)
    plain = replace(weights, w13=weights.w13.half(), w2=weights.w2.half(), w13_scale=None, w2_scale=None)
    sizes = [
        sum(s.nbytes for s in triton(SILU).workspace(r, w))
        for r, w in ((fp8_rows(rows), weights), (rows, weights), (rows, plain))
    ]
    assert sizes == sorted(sizes)


def test_the_first_call_of_deep_gemm_compiles_for_smaller_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    part, used = deep_gemm(SILU), []
    assert isinstance(part, DeepGemmBatchedExperts)
    gemm = part._library.masked_grouped_gemm
    monkeypatch.setattr(
        part._library,
        "masked_grouped_gemm",
        lambda *a, **k: (used.append(k["expected_rows"]), gemm(*a, **k)),
        raising=False,
    )
    rows, weights = BOTH[0].problem(torch.bfloat16)
    run(rows, weights, part)
    run(rows, weights, part)
    assert used == [1, 1, 2, 2, 4, 4, 4, 4, 4, 4]


def test_refuses_by_name() -> None:
    rows, weights = BOTH[0].problem(torch.bfloat16)
    half, _ = BOTH[0].problem(torch.float16)
    plain = ExpertWeights(w13=weights.w13.bfloat16(), w2=weights.w2.bfloat16())
    standard = StandardRows(rows.x[0], torch.zeros(16, 1, dtype=torch.int32), torch.ones(16, 1))
    with pytest.raises(UnsupportedError, match="the standard format in the deep_gemm_batched experts"):
        deep_gemm(SILU).workspace(standard, weights)
    for make, given, of, says in (
        (deep_gemm, rows, plain, "unquantised weights in the deep_gemm_batched experts"),
        (deep_gemm, half, weights, r"rows in torch\.float16 in the deep_gemm_batched experts"),
        (deep_gemm, rows, replace(weights, w2_bias=plain.w2[:, :, 0]), "a bias in the deep_gemm_batched experts"),
        (
            deep_gemm,
            replace(rows, expert_num_tokens=rows.expert_num_tokens.long()),
            weights,
            r"int64 in the deep_gemm_ba",
        ),
        (triton, fp8_rows(rows), plain, "rows in fp8 with unquantised weights in the triton_batched experts"),
        (triton, rows, replace(weights, w13_scale=None), "w13 in .* without w13_scale in the triton_batched experts"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            run(given, of, make(SILU))
    bad = replace(fp8_rows(rows), x_scale=torch.ones(4, 16, 1, device=DEVICE))
    for make in (triton, deep_gemm):
        with pytest.raises(ShapeError, match=r"x_scale: expected shape \[E=4, C=16, 256/128=2\], got \[4, 16, 1\]"):
            run(bad, weights, make(SILU))
        with pytest.raises(UnsupportedError, match="choose an all-to-all that weights in finalize"):
            make(SILU).apply(
                rows, weights, workspace=[], weight_and_reduce_by=WeightAndReduceBy.EXPERTS,
                router_weight_on_input=False,
            )  # fmt: skip
    with pytest.raises(UnsupportedError, match="gates and ups interleaved and a scale per 128 x 128 block in the tri"):
        run(half, weights, triton(GPT_OSS))


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True], ids=["rows as they are", "rows in fp8"])
@pytest.mark.parametrize("make", [triton, deep_gemm])
def test_a_cuda_graph_reads_the_counts_of_each_replay(make: Make, in_fp8: bool) -> None:
    case, other = (Case("", counts=c, C=256, H=1024, F=256) for c in ((3, 0, 16, 1), (256, 5, 0, 133)))
    rows, weights = case.problem(torch.bfloat16)
    new, _ = other.problem(torch.bfloat16)
    if in_fp8:
        rows, new = fp8_rows(rows), fp8_rows(new)
    experts = make(SILU)
    run(rows, weights, experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(rows, weights, experts)
    rows.x.copy_(new.x)
    rows.expert_num_tokens.copy_(new.expert_num_tokens)
    if rows.x_scale is not None and new.x_scale is not None:
        rows.x_scale.copy_(new.x_scale)
    graph.replay()
    assert torch.equal(real(got, other), real(run(new, weights, experts), other))

"""The triton_batched experts against float64, block by block."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, DTYPES, poisoned, randn
from tests.kernels.interpreter import multiplies_each_row_alone  # noqa: F401
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.triton_batched_experts import TritonBatchedExperts
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = Activation(kind=ActivationKind.SILU)
GPT_OSS = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
FINALIZE = WeightAndReduceBy.FINALIZE


@dataclass(frozen=True)
class Case:
    why: str
    counts: tuple[int, ...] = (0, 3, 16, 1)
    C: int = 16
    H: int = 64
    F: int = 32
    activation: Activation = SILU
    bias: bool = False

    def problem(self, dtype: torch.dtype) -> tuple[BatchedRows, ExpertWeights]:
        """Rows behind the counts are NaN."""
        E = len(self.counts)
        x = poisoned(E, self.C, self.H, dtype=dtype)
        for e, count in enumerate(self.counts):
            x[e, :count] = randn(count, self.H, dtype=dtype, seed=e)
        weights = ExpertWeights(
            w13=randn(E, 2 * self.F, self.H, dtype=dtype, seed=50) / self.H**0.5,
            w2=randn(E, self.H, self.F, dtype=dtype, seed=51) / self.F**0.5,
            w13_bias=randn(E, 2 * self.F, dtype=dtype, seed=52) if self.bias else None,
            w2_bias=randn(E, self.H, dtype=dtype, seed=53) if self.bias else None,
        )
        return BatchedRows(x, torch.tensor(self.counts, dtype=torch.int32, device=DEVICE)), weights

    def __str__(self) -> str:
        return self.why


CASES = [
    Case("empty, ragged and full blocks"),
    Case("gpt-oss", H=72, F=40, activation=GPT_OSS, bias=True),
    Case("rows of no multiple of 16 bytes", C=7, counts=(7, 0, 2), H=66, F=38),
    Case("many rows per expert", C=150, counts=(150, 31)),
    Case("nobody has rows", counts=(0, 0)),
    Case("no experts on this rank", counts=()),
    Case("12 experts", counts=tuple(range(12)), C=12, activation=Activation(kind=ActivationKind.GELU_TANH)),
]


def run(rows: BatchedRows, weights: ExpertWeights, experts: TritonBatchedExperts) -> torch.Tensor:
    workspace = [poisoned(*spec.shape, dtype=spec.dtype) for spec in experts.workspace(rows, weights)]
    return experts.apply(
        rows, weights, workspace=workspace, weight_and_reduce_by=FINALIZE, router_weight_on_input=False
    )


def real(t_ECH: torch.Tensor, case: Case) -> torch.Tensor:
    return torch.cat([t_ECH[:0, 0], *(t_ECH[e, :count] for e, count in enumerate(case.counts))])


def reference(rows: BatchedRows, weights: ExpertWeights, case: Case, dtype: torch.dtype) -> torch.Tensor:
    a = case.activation
    activate = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    x, w13, w2 = (t.to(dtype) for t in (rows.x, weights.w13, weights.w2))
    h = x @ w13.mT
    if weights.w13_bias is not None:
        h = h + weights.w13_bias.to(dtype)[:, None]
    y = activate(h) @ w2.mT
    return y if weights.w2_bias is None else y + weights.w2_bias.to(dtype)[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    rows, weights = case.problem(dtype)
    got = run(rows, weights, TritonBatchedExperts(case.activation))
    assert got.shape == rows.x.shape
    naive, truth = (real(reference(rows, weights, case, d), case) for d in (dtype, torch.float64))
    assert_as_accurate_as(real(got, case), naive, truth)


@pytest.mark.usefixtures("multiplies_each_row_alone")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    tiles = GemmTiles(16, gated=GemmTile(16, 32, 1, 4, 2), down=GemmTile(16, 32, 1, 4, 2))
    many, few = Case("", counts=(16, 16)), Case("", counts=(16, 1))
    rows, weights = many.problem(torch.float32)
    alone, _ = few.problem(torch.float32)
    experts = TritonBatchedExperts(SILU, tiles=tiles)
    assert torch.equal(run(rows, weights, experts)[1, 0], run(alone, weights, experts)[1, 0])


def test_refuses_by_name() -> None:
    with pytest.raises(UnsupportedError, match="silu_no_mul in the triton_batched experts"):
        TritonBatchedExperts(Activation(kind=ActivationKind.SILU_NO_MUL))
    rows, weights = CASES[0].problem(torch.float32)
    experts = TritonBatchedExperts(SILU)
    standard = StandardRows(rows.x[0], torch.zeros(16, 1, dtype=torch.int32), torch.ones(16, 1))
    with pytest.raises(UnsupportedError, match="the standard format in the triton_batched experts"):
        experts.workspace(standard, weights)
    with pytest.raises(UnsupportedError, match="choose an all-to-all that weights in finalize"):
        experts.apply(
            rows, weights, workspace=[], weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False
        )
    with pytest.raises(ShapeError, match=r"x: expected shape \[E=4, C=16, H=64\], got \[2, 16, 64\]"):
        run(BatchedRows(rows.x[:2], rows.expert_num_tokens[:2]), weights, experts)
    with pytest.raises(UnsupportedError, match=r"w13 in torch\.float16 with rows in torch\.float32"):
        half = ExpertWeights(w13=weights.w13.half(), w2=weights.w2.half())
        run(rows, half, experts)


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_counts_of_each_replay() -> None:
    case = Case("", counts=(3, 0, 16, 1), C=64, H=128, F=64)
    rows, weights = case.problem(torch.bfloat16)
    experts = TritonBatchedExperts(SILU)
    workspace = [poisoned(*spec.shape, dtype=spec.dtype) for spec in experts.workspace(rows, weights)]
    call = partial(
        experts.apply, rows, weights, workspace=workspace, weight_and_reduce_by=FINALIZE, router_weight_on_input=False
    )
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    other, _ = Case("", counts=(64, 5, 0, 33), C=64, H=128, F=64).problem(torch.bfloat16)
    rows.x.copy_(other.x)
    rows.expert_num_tokens.copy_(other.expert_num_tokens)
    graph.replay()
    again = run(other, weights, experts)
    for e, count in enumerate((64, 5, 0, 33)):
        assert torch.equal(got[e, :count], again[e, :count])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"expert_num_tokens": torch.zeros(9, dtype=torch.int32)},
            ShapeError,
            r"expert_num_tokens in the triton_batched .*9",
        ),
        (
            {"expert_num_tokens": torch.zeros(4, dtype=torch.int64)},
            UnsupportedError,
            r"torch.int64 in the triton_batched",
        ),
        (
            {"out_dtype": torch.float8_e4m3fn},
            UnsupportedError,
            r"out_dtype torch.float8_e4m3fn in the triton_batched",
        ),
    ],
    ids=["counts of other experts", "counts in int64", "fp8 results"],
)
def test_counts_that_do_not_fit_the_blocks_are_refused(
    wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    rows, weights = Case("").problem(torch.float32)
    with pytest.raises(error, match=message):
        run(replace(rows, **wrong), weights, TritonBatchedExperts(SILU))  # type: ignore[arg-type]

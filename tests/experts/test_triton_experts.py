"""experts.triton_experts as a whole: against float64, then each property that has a name."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, DTYPES, poisoned, randn, random_ids
from tests.kernels.interpreter import multiplies_each_row_alone  # noqa: F401
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.triton_experts import TritonExperts, is_small_batch
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.small_batch_down import small_batch_down
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = Activation(kind=ActivationKind.SILU)
GPT_OSS = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
FIXED_TILES = GemmTiles(16, gated=GemmTile(16, 32, 1, 4, 2), down=GemmTile(32, 16, 1, 4, 2))


@dataclass(frozen=True)
class Case:
    why: str
    R: int
    K: int = 2
    E: int = 8
    H: int = 64
    F: int = 32
    activation: Activation = SILU
    bias: bool = False
    weight_on_input: bool = False
    ids_dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        return self.why

    def problem(self, dtype: torch.dtype) -> tuple[StandardRows, ExpertWeights]:
        ids = random_ids(self.R, self.K, self.E).to(self.ids_dtype)
        rows = StandardRows(
            x=randn(self.R, self.H, dtype=dtype),
            topk_ids=ids,
            topk_weights=randn(self.R, self.K, dtype=torch.float32, seed=1).abs(),
        )
        weights = ExpertWeights(
            w13=randn(self.E, 2 * self.F, self.H, dtype=dtype, seed=2) / self.H**0.5,
            w2=randn(self.E, self.H, self.F, dtype=dtype, seed=3) / self.F**0.5,
            w13_bias=randn(self.E, 2 * self.F, dtype=dtype, seed=4) if self.bias else None,
            w2_bias=randn(self.E, self.H, dtype=dtype, seed=5) if self.bias else None,
        )
        return rows, weights


CASES = [
    Case("one row", R=1),
    Case("one row, gpt-oss", R=1, K=4, H=72, F=40, activation=GPT_OSS, bias=True),
    Case("one row, weight on input", R=1, weight_on_input=True, bias=True),
    Case("two rows slot by slot", R=2, K=1, E=16),
    Case("a batch", R=33),
    Case("gpt-oss", R=17, K=4, H=72, F=40, activation=GPT_OSS, bias=True),
    Case("top 3 of 12, int64 ids", R=20, K=3, E=12, H=66, F=38, ids_dtype=torch.int64),
    Case("weight on input", R=20, K=1, activation=Activation(kind=ActivationKind.GELU), weight_on_input=True),
    Case("many rows per expert", R=150, K=1, E=2, activation=Activation(kind=ActivationKind.GELU_TANH)),
]


def run(
    rows: StandardRows, weights: ExpertWeights, experts: TritonExperts, *, weight_on_input: bool = False
) -> torch.Tensor:
    workspace = [poisoned(*spec.shape, dtype=spec.dtype) for spec in experts.workspace(rows, weights)]
    return experts.apply(
        rows, weights, workspace=workspace, weight_and_reduce_by=WeightAndReduceBy.EXPERTS,
        router_weight_on_input=weight_on_input,
    )  # fmt: skip


def reference(rows: StandardRows, weights: ExpertWeights, case: Case, dtype: torch.dtype) -> torch.Tensor:
    a = case.activation
    activation = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    b13, b2 = (None if b is None else b.to(dtype) for b in (weights.w13_bias, weights.w2_bias))
    on_input, on_output = rows.topk_weights, None
    if not case.weight_on_input:
        on_input, on_output = on_output, on_input
    activated = small_batch_gated(
        rows.x.to(dtype), weights.w13.to(dtype), rows.topk_ids, activation=activation, bias=b13,
        topk_weights_RK=on_input,
    )  # fmt: skip
    return small_batch_down(activated, weights.w2.to(dtype), rows.topk_ids, on_output, bias=b2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    rows, weights = case.problem(dtype)
    got = run(rows, weights, TritonExperts(case.activation), weight_on_input=case.weight_on_input)
    assert_as_accurate_as(
        got, reference(rows, weights, case, dtype), reference(rows, weights, case, torch.float64)
    )  # fmt: skip


@pytest.mark.parametrize("R", [1, 2, 21])
def test_garbage_behind_ids_that_are_not_here(R: int) -> None:
    case = Case("", R=R, E=16, bias=True)
    rows, weights = case.problem(torch.float32)
    rows.topk_ids[0, 0], rows.topk_weights[0, 0] = -1, float("nan")
    rows.topk_ids[-1, 1], rows.topk_weights[-1, 1] = case.E, float("nan")
    truth = reference(rows, weights, case, torch.float64)
    got = run(rows, weights, TritonExperts(SILU))
    assert_as_accurate_as(got, reference(rows, weights, case, torch.float32), truth)


@pytest.mark.parametrize("R", [1, 21])
def test_rows_without_an_expert_are_zero(R: int) -> None:
    rows, weights = Case("", R=R, bias=True).problem(torch.float32)
    rows.topk_ids[:] = -1
    rows.x[:], rows.topk_weights[:] = float("nan"), float("nan")
    assert not run(rows, weights, TritonExperts(SILU)).any()


def test_padding_rows_change_nothing() -> None:
    """An all-to-all hands over its whole buffer: what follows the real rows is uninitialised."""
    rows, weights = Case("", R=20).problem(torch.float32)
    padded = StandardRows(
        x=torch.cat([rows.x, poisoned(30, 64, dtype=torch.float32)]),
        topk_ids=torch.cat([rows.topk_ids, torch.full((30, 2), -1, dtype=torch.int32, device=DEVICE)]),
        topk_weights=torch.cat([rows.topk_weights, poisoned(30, 2, dtype=torch.float32)]),
    )
    experts = TritonExperts(SILU, tiles=FIXED_TILES)
    assert torch.equal(run(padded, weights, experts)[:20], run(rows, weights, experts))


def test_all_rows_to_one_expert() -> None:
    case = Case("", R=40, K=1)
    rows, weights = case.problem(torch.float32)
    rows.topk_ids[:] = 5
    naive, truth = (reference(rows, weights, case, d) for d in (torch.float32, torch.float64))
    assert_as_accurate_as(run(rows, weights, TritonExperts(SILU)), naive, truth)


def test_gathering_first_changes_no_bit() -> None:
    rows, weights = Case("", R=20).problem(torch.float16)
    rows.topk_ids[3] = -1
    gather_first = TritonExperts(SILU, tiles=replace(FIXED_TILES, gather_first=True))
    assert torch.equal(run(rows, weights, gather_first), run(rows, weights, TritonExperts(SILU, tiles=FIXED_TILES)))


def test_no_rows() -> None:
    rows, weights = Case("", R=1).problem(torch.float32)
    none = StandardRows(rows.x[:0], rows.topk_ids[:0], rows.topk_weights[:0])
    assert run(none, weights, TritonExperts(SILU)).shape == (0, 64)


@pytest.mark.parametrize("R", [1, 21])
def test_no_experts_on_this_rank(R: int) -> None:
    rows, weights = Case("", R=R).problem(torch.float32)
    rows.topk_ids[:] = -1
    out = run(rows, ExpertWeights(w13=weights.w13[:0], w2=weights.w2[:0]), TritonExperts(SILU))
    assert out.shape == (R, 64)
    assert not out.any()


@pytest.mark.usefixtures("multiplies_each_row_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("few", "many"), [(5, 40), (1, 2)], ids=["in batches", "slot by slot"])
def test_a_row_does_not_depend_on_its_neighbours(few: int, many: int, dtype: torch.dtype) -> None:
    """Batch invariance at equal tile choice: the same bits in a small and in a large batch."""
    rows, weights = Case("", R=many, E=16).problem(dtype)
    experts = TritonExperts(SILU, tiles=FIXED_TILES)
    part = StandardRows(rows.x[-few:], rows.topk_ids[-few:], rows.topk_weights[-few:])
    assert is_small_batch(few, 2, 16) == is_small_batch(many, 2, 16)
    assert torch.equal(run(part, weights, experts), run(rows, weights, experts)[-few:])


def test_rows_of_a_wider_tensor() -> None:
    rows, weights = Case("", R=20).problem(torch.float32)
    wide = torch.cat([rows.x, rows.x], dim=1)[:, :64]
    experts = TritonExperts(SILU)
    assert torch.equal(run(replace(rows, x=wide), weights, experts), run(rows, weights, experts))


@pytest.mark.parametrize(("rows", "fewer"), [(12_288, 12_287), (4096, 4095), (24_576, 24_575)])
def test_a_workspace_for_many_rows_is_enough_for_fewer(rows: int, fewer: int) -> None:
    """Blocks get lower with the rows, and more of them: here by one that outweighs a row."""
    E, H, F = 512, 64, 64
    weights = ExpertWeights(w13=torch.empty(E, 2 * F, H, device="meta"), w2=torch.empty(E, H, F, device="meta"))

    def nbytes(R: int) -> int:
        given = StandardRows(
            torch.empty(R, H, device="meta"), torch.empty(R, 1, dtype=torch.int32, device="meta"),
            torch.empty(R, 1, device="meta"),
        )  # fmt: skip
        return sum(spec.nbytes for spec in TritonExperts(SILU).workspace(given, weights))

    assert nbytes(fewer) <= nbytes(rows)


def test_workspace_is_no_larger_than_the_plain_one() -> None:
    """The plain one: all 2F columns or the expert rows, whichever is larger, and the activated rows."""
    case = Case("", R=512, K=8, E=64, H=256, F=96)
    rows, weights = case.problem(torch.float16)
    plain = 512 * 8 * (max(2 * case.F, case.H) + case.F) * 2
    activated, expert_rows, ints = TritonExperts(SILU).workspace(rows, weights)
    assert activated.nbytes + expert_rows.nbytes <= plain
    assert ints.nbytes <= 512 * 8 * 4 + 64 * 64, "a position for each slot, and little for each expert"


def test_refuses_by_name() -> None:
    with pytest.raises(UnsupportedError, match="silu_no_mul"):
        TritonExperts(Activation(kind=ActivationKind.SILU_NO_MUL))
    rows, weights = Case("", R=1).problem(torch.float32)
    batched = BatchedRows(rows.x[None], torch.ones(1, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="choose an all-to-all of the standard format"):
        TritonExperts(SILU).workspace(batched, weights)


def test_refuses_weights_that_do_not_fit() -> None:
    rows, weights = Case("", R=1).problem(torch.float32)
    experts = TritonExperts(SILU)
    with pytest.raises(ShapeError, match="w13: expected shape"):
        run(rows, replace(weights, w13=weights.w13[:, 2:]), experts)
    with pytest.raises(ShapeError, match="x: expected shape"):
        run(replace(rows, x=rows.x[:, 1:]), weights, experts)
    with pytest.raises(UnsupportedError, match=r"w2 in torch\.float16"):
        run(rows, replace(weights, w2=weights.w2.half()), experts)
    with pytest.raises(UnsupportedError, match="w2 with strides"):
        run(rows, replace(weights, w2=weights.w2.transpose(0, 1).contiguous().transpose(0, 1)), experts)


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 3, 32, 300])
def test_replays_in_a_cuda_graph_with_other_ids(R: int) -> None:
    case = Case("", R=R, E=16, H=256, F=128)
    rows, weights = case.problem(torch.bfloat16)
    experts = TritonExperts(SILU)
    run(rows, weights, experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(rows, weights, experts)
    rows.topk_ids.copy_(random_ids(R, 2, 16, seed=7))
    rows.topk_ids[0, 0] = -1
    graph.replay()
    naive, truth = (reference(rows, weights, case, d) for d in (torch.bfloat16, torch.float64))
    assert_as_accurate_as(got, naive, truth)


@pytest.mark.gpu
def test_more_rows_than_a_grid_axis() -> None:
    """70 000 rows x 2 x 16 384 columns: past 65 535 programs, and 2**31 elements."""
    R, E, H, F = 70_000, 4, 16_384, 64
    x = torch.randn(R, H, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(R, E, device=DEVICE).topk(2).indices.int()
    rows = StandardRows(x, ids, torch.rand(R, 2, device=DEVICE))
    weights = ExpertWeights(
        w13=torch.randn(E, 2 * F, H, device=DEVICE, dtype=torch.bfloat16) / H**0.5,
        w2=torch.randn(E, H, F, device=DEVICE, dtype=torch.bfloat16) / F**0.5,
    )
    got = run(rows, weights, TritonExperts(SILU))
    tail = StandardRows(x[-8:], ids[-8:], rows.topk_weights[-8:])
    case = Case("", R=8, E=E, H=H, F=F)
    naive, truth = (reference(tail, weights, case, d) for d in (torch.bfloat16, torch.float64))
    assert_as_accurate_as(got[-8:], naive, truth)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"topk_ids": torch.zeros(2, 3, dtype=torch.int32)},
            ShapeError,
            r"topk_ids in the triton .*R=5, K=3.*2, 3",
        ),
        ({"topk_weights": torch.zeros(4, 3)}, ShapeError, r"topk_weights in the triton .*R=5, K=3.*4, 3"),
        ({"out_dtype": torch.float8_e4m3fn}, UnsupportedError, r"out_dtype torch.float8_e4m3fn in the triton"),
        ({"out_dtype": torch.int32}, UnsupportedError, r"out_dtype torch.int32 in the triton"),
    ],
    ids=["ids of other rows", "weights of other rows", "fp8 results", "integer results"],
)
def test_routing_that_does_not_fit_the_rows_is_refused(
    wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    rows, weights = Case("", R=5, K=3).problem(torch.float32)
    with pytest.raises(error, match=message):
        run(replace(rows, **wrong), weights, TritonExperts(SILU))  # type: ignore[arg-type]

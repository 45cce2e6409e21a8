"""experts.triton_experts with weights in fp8: against float64 over what the numbers stand for, then by name."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, randn, random_fp8_weights, random_ids, stand_for
from tests.kernels.interpreter import multiplies_each_row_alone  # noqa: F401
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.triton_experts import TritonExperts, is_small_batch
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.reference.small_batch_down import small_batch_down
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated
from vllm_moe_modular.testing.fp8_rows import fp8_rows
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = Activation(kind=ActivationKind.SILU)
GPT_OSS = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
FIXED_TILES = GemmTiles(16, gated=GemmTile(128, 128, 1, 4, 2), down=GemmTile(128, 128, 1, 4, 2))


@dataclass(frozen=True)
class Case:
    why: str
    R: int
    K: int = 2
    E: int = 8
    H: int = 256
    F: int = 128
    blocks: bool = True
    activation: Activation = SILU
    bias: bool = False
    weight_on_input: bool = False
    ids_dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        return self.why

    def problem(self, dtype: torch.dtype) -> tuple[StandardRows, ExpertWeights]:
        rows = StandardRows(
            x=randn(self.R, self.H, dtype=dtype),
            topk_ids=random_ids(self.R, self.K, self.E).to(self.ids_dtype),
            topk_weights=randn(self.R, self.K, dtype=torch.float32, seed=1).abs(),
        )
        w13, w13_scale = random_fp8_weights(self.E, 2 * self.F, self.H, blocks=self.blocks, seed=2)
        w2, w2_scale = random_fp8_weights(self.E, self.H, self.F, blocks=self.blocks, seed=3)
        return rows, ExpertWeights(
            w13=w13,
            w2=w2,
            w13_bias=randn(self.E, 2 * self.F, dtype=dtype, seed=4) if self.bias else None,
            w2_bias=randn(self.E, self.H, dtype=dtype, seed=5) if self.bias else None,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
        )


CASES = [
    Case("one row, blocks", R=1),
    Case("one row, channels", R=1, K=4, H=72, F=40, activation=GPT_OSS, bias=True, blocks=False),
    Case("two rows slot by slot", R=2, K=1, E=16),
    Case("a batch, blocks", R=33),
    Case("a batch, channels", R=33, blocks=False),
    Case("top 3 of 12, int64 ids, hidden not a multiple of 128", R=20, K=3, E=12, H=200, ids_dtype=torch.int64),
    Case("gpt-oss, channels", R=17, K=4, H=72, F=40, activation=GPT_OSS, bias=True, blocks=False),
    Case("nothing even, channels", R=20, K=3, E=12, H=66, F=38, blocks=False),
    Case("rows smaller than the alignment of a buffer", R=3, K=1, E=2, H=16, F=16, blocks=False),
    Case("weight on input", R=20, K=1, activation=Activation(kind=ActivationKind.GELU), weight_on_input=True),
    Case("many rows per expert", R=150, K=1, E=2, activation=Activation(kind=ActivationKind.GELU_TANH)),
    Case("between few and many rows per expert", R=60, K=1, E=2),
]


def run(
    rows: StandardRows, weights: ExpertWeights, experts: TritonExperts, *, weight_on_input: bool = False
) -> torch.Tensor:
    workspace = [poisoned(*spec.shape, dtype=spec.dtype) for spec in experts.workspace(rows, weights)]
    return experts.apply(
        rows, weights, workspace=workspace, weight_and_reduce_by=WeightAndReduceBy.EXPERTS,
        router_weight_on_input=weight_on_input,
    )  # fmt: skip


def reference(
    rows: StandardRows, weights: ExpertWeights, case: Case, dtype: torch.dtype, *, quantise_rows: bool
) -> torch.Tensor:
    """In `dtype`, over what the weights stand for; the rows and the activated rows quantised on the way, or not."""
    a = case.activation
    activation = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None

    def on_the_way(x: torch.Tensor) -> torch.Tensor:
        return dequantize_fp8(*quantize_fp8(x)).to(dtype) if quantise_rows else x.to(dtype)

    b13, b2 = (None if b is None else b.to(dtype) for b in (weights.w13_bias, weights.w2_bias))
    on_input, on_output = rows.topk_weights, None
    if not case.weight_on_input:
        on_input, on_output = on_output, on_input
    activated = small_batch_gated(
        on_the_way(rows.x), stand_for(weights.w13, weights.w13_scale, dtype), rows.topk_ids, activation=activation,
        bias=b13, topk_weights_RK=on_input,
    )  # fmt: skip
    w2 = stand_for(weights.w2, weights.w2_scale, dtype)
    return small_batch_down(on_the_way(activated), w2, rows.topk_ids, on_output, bias=b2)


def assert_right(got: torch.Tensor, rows: StandardRows, weights: ExpertWeights, case: Case) -> None:
    """A batch may be twice as wrong as plain torch with rows quantised too; a few rows as plain torch with none."""
    few = is_small_batch(case.R, case.K, case.E)
    naive = reference(rows, weights, case, rows.x.dtype, quantise_rows=not few)
    assert_as_accurate_as(got, naive, reference(rows, weights, case, torch.float64, quantise_rows=False))


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case, dtype: torch.dtype) -> None:
    rows, weights = case.problem(dtype)
    got = run(rows, weights, TritonExperts(case.activation), weight_on_input=case.weight_on_input)
    assert got.dtype == dtype
    assert_right(got, rows, weights, case)


@pytest.mark.parametrize("R", [1, 2, 21])
def test_garbage_behind_ids_that_are_not_here(R: int) -> None:
    case = Case("", R=R, E=16, bias=True)
    rows, weights = case.problem(torch.float16)
    rows.topk_ids[0, 0], rows.topk_weights[0, 0] = -1, float("nan")
    rows.topk_ids[-1, 1], rows.topk_weights[-1, 1] = case.E, float("nan")
    assert_right(run(rows, weights, TritonExperts(SILU)), rows, weights, case)


@pytest.mark.parametrize("R", [1, 21])
def test_rows_without_an_expert_are_zero(R: int) -> None:
    rows, weights = Case("", R=R, bias=True).problem(torch.float16)
    rows.topk_ids[:] = -1
    rows.x[:], rows.topk_weights[:] = float("nan"), float("nan")
    assert not run(rows, weights, TritonExperts(SILU)).any()


def test_padding_rows_change_nothing() -> None:
    rows, weights = Case("", R=20).problem(torch.float16)
    padded = StandardRows(
        x=torch.cat([rows.x, poisoned(30, 256, dtype=torch.float16)]),
        topk_ids=torch.cat([rows.topk_ids, torch.full((30, 2), -1, dtype=torch.int32, device=DEVICE)]),
        topk_weights=torch.cat([rows.topk_weights, poisoned(30, 2, dtype=torch.float32)]),
    )
    experts = TritonExperts(SILU, tiles=FIXED_TILES)
    assert torch.equal(run(padded, weights, experts)[:20], run(rows, weights, experts))


def test_gathering_first_changes_no_bit() -> None:
    rows, weights = Case("", R=20).problem(torch.float16)
    rows.topk_ids[3] = -1
    gather_first = TritonExperts(SILU, tiles=replace(FIXED_TILES, gather_first=True))
    assert torch.equal(run(rows, weights, gather_first), run(rows, weights, TritonExperts(SILU, tiles=FIXED_TILES)))


def strided(rows: StandardRows) -> StandardRows:
    """With the scales of a group side by side, as some all-to-alls deliver them."""
    assert rows.x_scale is not None
    return replace(rows, x_scale=rows.x_scale.T.contiguous().T)


@pytest.mark.parametrize("gather_first", [False, True], ids=["in place", "gathered"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "channels"])
def test_rows_that_come_in_fp8_give_the_bits_of_rows_that_are_quantised_here(blocks: bool, gather_first: bool) -> None:
    rows, weights = Case("", R=20, blocks=blocks, bias=True).problem(torch.float16)
    rows.topk_ids[3, 0], rows.topk_ids[5] = -1, -1
    experts = TritonExperts(SILU, tiles=replace(FIXED_TILES, gather_first=gather_first))
    want = run(rows, weights, experts)
    quantised = fp8_rows(rows)
    for given in (quantised, strided(quantised)):
        got = run(given, weights, experts)
        assert got.dtype == torch.float16
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", [case for case in CASES[:3] if case.H % 128 == 0] + [
    Case("one row, channels, several groups", R=1, H=384, blocks=False),
    Case("one row, blocks, deeper than a step", R=1, H=1280),
], ids=str)  # fmt: skip
def test_few_rows_that_come_in_fp8(case: Case) -> None:
    rows, weights = case.problem(torch.float16)
    quantised = fp8_rows(rows)
    meant = replace(rows, x=dequantized_rows(replace(quantised, out_dtype=torch.float64)))
    naive, truth = (
        reference(meant, weights, case, dtype, quantise_rows=False) for dtype in (torch.float16, torch.float64)
    )
    for given in (quantised, strided(quantised)):
        assert_as_accurate_as(run(given, weights, TritonExperts(SILU)), naive, truth)


def test_no_rows_in_fp8() -> None:
    rows, weights = Case("", R=1).problem(torch.float16)
    quantised = fp8_rows(rows)
    none = replace(quantised, x=quantised.x[:0], topk_ids=rows.topk_ids[:0], topk_weights=rows.topk_weights[:0],
                   x_scale=torch.empty(0, 2, device=DEVICE))  # fmt: skip
    out = run(none, weights, TritonExperts(SILU))
    assert out.shape == (0, 256)
    assert out.dtype == torch.float16


def test_scratch_memory_for_rows_in_fp8_is_no_larger() -> None:
    for R in (1, 64):
        rows, weights = Case("", R=R, K=4).problem(torch.float16)
        fp8, plain = (sum(s.nbytes for s in TritonExperts(SILU).workspace(r, weights)) for r in (fp8_rows(rows), rows))
        assert fp8 <= plain


def test_refuses_rows_in_fp8_that_do_not_fit() -> None:
    rows, weights = Case("", R=4).problem(torch.float16)
    quantised, experts = fp8_rows(rows), TritonExperts(SILU)
    plain = replace(weights, w13=weights.w13.half(), w2=weights.w2.half(), w13_scale=None, w2_scale=None)
    with pytest.raises(UnsupportedError, match="rows in fp8 with unquantised weights in the triton experts"):
        run(quantised, plain, experts)
    with pytest.raises(UnsupportedError, match=r"rows in torch\.float8_e4m3fn without x_scale"):
        run(replace(quantised, x_scale=None), weights, experts)
    with pytest.raises(UnsupportedError, match=r"rows in torch\.float16 with x_scale"):
        run(replace(rows, x_scale=quantised.x_scale), weights, experts)
    with pytest.raises(ShapeError, match=r"x_scale: expected shape \[R=4, 256/128=2\], got \[4, 1\]"):
        run(replace(quantised, x_scale=torch.ones(4, 1, device=DEVICE)), weights, experts)
    with pytest.raises(UnsupportedError, match="out_dtype None"):
        run(replace(quantised, out_dtype=None), weights, experts)
    with pytest.raises(UnsupportedError, match="fp8 weights with rows in float32"):
        run(replace(quantised, out_dtype=torch.float32), weights, experts)


def test_no_rows() -> None:
    rows, weights = Case("", R=1).problem(torch.float16)
    none = StandardRows(rows.x[:0], rows.topk_ids[:0], rows.topk_weights[:0])
    assert run(none, weights, TritonExperts(SILU)).shape == (0, 256)


@pytest.mark.usefixtures("multiplies_each_row_alone")
@pytest.mark.parametrize(("few", "many"), [(5, 40), (1, 2)], ids=["in batches", "slot by slot"])
def test_a_row_does_not_depend_on_its_neighbours(few: int, many: int) -> None:
    rows, weights = Case("", R=many, E=16).problem(torch.float16)
    experts = TritonExperts(SILU, tiles=FIXED_TILES)
    part = StandardRows(rows.x[-few:], rows.topk_ids[-few:], rows.topk_weights[-few:])
    assert torch.equal(run(part, weights, experts), run(rows, weights, experts)[-few:])


def test_workspace_is_no_larger_than_unquantised() -> None:
    case = Case("", R=64, K=4)
    rows, weights = case.problem(torch.float16)
    plain = replace(weights, w13=weights.w13.half(), w2=weights.w2.half(), w13_scale=None, w2_scale=None)
    fp8, unquantised = (sum(s.nbytes for s in TritonExperts(SILU).workspace(rows, w)) for w in (weights, plain))
    assert fp8 <= unquantised


def test_refuses_what_does_not_fit() -> None:
    rows, weights = Case("", R=1).problem(torch.float16)
    _, by_channel = Case("", R=1, blocks=False).problem(torch.float16)
    experts = TritonExperts(SILU)
    with pytest.raises(UnsupportedError, match=r"w13 in torch\.float8_e4m3fn without w13_scale in the triton experts"):
        run(rows, replace(weights, w13_scale=None), experts)
    with pytest.raises(UnsupportedError, match=r"w2 in torch\.float16 with w2_scale"):
        run(rows, replace(weights, w2=weights.w2.half()), experts)
    with pytest.raises(UnsupportedError, match=r"w2_scale in torch\.float16"):
        run(rows, replace(weights, w2_scale=by_channel.w2_scale.half()), experts)
    with pytest.raises(ShapeError, match=r"w2_scale: expected shape \[E=8, N/128=2, D/128=1\], got \[8, 2, 2\]"):
        run(rows, replace(weights, w2_scale=torch.ones(8, 2, 2, device=DEVICE)), experts)
    with pytest.raises(ShapeError, match=r"w13_scale: expected shape \[E=8, N=256\], got \[8\]"):
        run(rows, replace(weights, w13_scale=torch.ones(8, device=DEVICE)), experts)
    with pytest.raises(UnsupportedError, match="w13 scaled per output channel with w2 scaled per 128 x 128 block"):
        run(rows, replace(weights, w13_scale=by_channel.w13_scale), experts)


def test_refuses_blocks_that_hold_gates_and_ups() -> None:
    rows, weights = Case("", R=1, F=192).problem(torch.float16)
    with pytest.raises(UnsupportedError, match="an intermediate size of 192 with a scale per 128 x 128 block"):
        run(rows, weights, TritonExperts(SILU))
    rows, weights = Case("", R=1).problem(torch.float16)
    with pytest.raises(UnsupportedError, match="gates and ups interleaved and a scale per 128 x 128 block"):
        run(rows, weights, TritonExperts(GPT_OSS))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "channels"])
@pytest.mark.parametrize("R", [3, 32, 300, 1600])
def test_rows_in_fp8_give_the_same_bits_with_every_tile(R: int, blocks: bool) -> None:
    rows, weights = Case("", R=R, E=16, H=1024, F=256, blocks=blocks).problem(torch.bfloat16)
    quantised, experts = fp8_rows(rows), TritonExperts(SILU)
    want = run(rows, weights, experts)
    assert torch.equal(run(quantised, weights, experts), want)
    assert torch.equal(run(strided(quantised), weights, experts), want)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "channels"])
@pytest.mark.parametrize("R", [1, 3, 32, 300, 1600])
def test_replays_in_a_cuda_graph_with_other_ids(R: int, blocks: bool) -> None:
    case = Case("", R=R, E=16, blocks=blocks)
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
    assert_right(got, rows, weights, case)

"""kernels.grouped_gemm_gated and grouped_gemm_down against their references, block by block."""

from dataclasses import asdict, dataclass
from functools import partial

import pytest
import torch

from tests.kernels.common import DTYPES, poisoned, randn, random_ids
from vllm_moe_modular.kernels.align_rows import AlignedRows, align_rows, scratch_ints
from vllm_moe_modular.kernels.gated_activation import NAMES, GatedActivation
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.grouped_gemm_down import grouped_gemm_down
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.grouped_gemm_down import grouped_gemm_down as down_reference
from vllm_moe_modular.reference.grouped_gemm_gated import grouped_gemm_gated as gated_reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = GatedActivation("silu")


@dataclass(frozen=True)
class Case:
    why: str
    R: int = 20
    K: int = 2
    E: int = 4
    H: int = 64
    F: int = 32
    activation: GatedActivation = SILU
    bias: bool = False
    weight_on_input: bool = False
    programs_per_sm: int = 0
    block_rows: int = 16

    def __str__(self) -> str:
        return self.why


CASES = [
    Case("everything even"),
    Case("hidden and intermediate not multiples of a tile", H=72, F=40),
    Case("rows of weights not a multiple of 16 bytes", H=66, F=38),
    Case("top 3 of 12, biases", K=3, E=12, bias=True),
    Case("weights on the input", weight_on_input=True, bias=True),
    Case("packed swiglu_oai with a limit", activation=GatedActivation("swiglu_oai", limit=1.5), bias=True),
    Case("interleaved", F=40, activation=GatedActivation("swiglu_oai", limit=7.0, interleaved=True), bias=True),
    Case("interleaved, odd rows", H=66, F=38, activation=GatedActivation("silu", interleaved=True), bias=True),
    Case("persistent grid", R=40, programs_per_sm=1),
    Case("a block of rows larger than any group", block_rows=64),
    *(Case(f"activation {name}", activation=GatedActivation(name, alpha=1.3, beta=0.5)) for name in NAMES),
]


def align(case: Case) -> AlignedRows:
    ids = random_ids(case.R, case.K, case.E)
    ids[1, 0], ids[2, 1], ids[3] = -1, case.E, -1
    scratch = poisoned(scratch_ints(ids.numel(), case.E, case.block_rows), dtype=torch.int32)
    return align_rows(ids, case.E, case.block_rows, scratch=scratch)


def blocks_of(rows: AlignedRows) -> list[tuple[int, int, int]]:
    return [(e, start, n) for e, start, n, _ in rows.blocks[: int(rows.totals[0])].tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_matches_reference(case: Case, dtype: torch.dtype) -> None:
    rows = align(case)
    x, w13 = randn(case.R, case.H, dtype=dtype), randn(case.E, 2 * case.F, case.H, dtype=dtype, seed=1) / 8
    bias = randn(case.E, 2 * case.F, dtype=dtype, seed=2) if case.bias else None
    weights = randn(case.R, case.K, dtype=torch.float32, seed=3).abs() if case.weight_on_input else None
    out = poisoned(case.R * case.K, case.F, dtype=dtype)
    grouped_gemm_gated(
        x, w13, rows, out_SF=out, top_k=case.K, activation=case.activation, bias=bias, topk_weights_RK=weights,
        block_rows=case.block_rows, tile=GemmTile(16, 32, 2, 4, 2, case.programs_per_sm),
    )  # fmt: skip

    def reference(dtype: torch.dtype) -> torch.Tensor:
        return gated_reference(
            x.to(dtype), w13.to(dtype), rows.sorted_slots, blocks_of(rows), top_k=case.K,
            activation=partial(gated_activation, **asdict(case.activation)),
            bias=None if bias is None else bias.to(dtype), topk_weights_RK=weights,
        )  # fmt: skip

    n = sum(rows for _, _, rows in blocks_of(rows))
    assert_as_accurate_as(out[:n], reference(dtype)[:n], reference(torch.float64)[:n])
    assert out[n:].isnan().all(), "a position that is in no block was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[:4] + CASES[8:10], ids=str)
def test_down_matches_reference(case: Case, dtype: torch.dtype) -> None:
    rows = align(case)
    n = sum(rows for _, _, rows in blocks_of(rows))
    x, w2 = randn(case.R * case.K, case.F, dtype=dtype), randn(case.E, case.H, case.F, dtype=dtype, seed=1) / 8
    x[n:] = float("nan")  # rows that the first GEMM did not write
    bias = randn(case.E, case.H, dtype=dtype, seed=2) if case.bias else None
    out = poisoned(case.R * case.K, case.H, dtype=dtype)
    tile = GemmTile(32, 16, 2, 4, 2, case.programs_per_sm)
    grouped_gemm_down(x, w2, rows, out_SH=out, bias=bias, block_rows=case.block_rows, tile=tile)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        b = None if bias is None else bias.to(dtype)
        return down_reference(x.to(dtype), w2.to(dtype), rows.sorted_slots, blocks_of(rows), bias=b)

    here = rows.sorted_slots[:n].long()
    assert_as_accurate_as(out[here], reference(dtype)[here], reference(torch.float64)[here])
    assert out.isnan().all(dim=1).sum() == case.R * case.K - n, "a slot that is in no block was written"

"""kernels.grouped_gemm_gated_fp8 and grouped_gemm_down_fp8 against float64 over the quantised numbers."""

from dataclasses import asdict, dataclass
from functools import partial

import pytest
import torch

from tests.kernels.common import (
    DEVICE,
    poisoned,
    poisoned_fp8_rows,
    randn,
    random_fp8_weights,
    random_ids,
    stand_for,
)
from vllm_moe_modular.kernels.align_rows import AlignedRows, align_rows, scratch_ints
from vllm_moe_modular.kernels.gated_activation import NAMES, GatedActivation
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.grouped_gemm_down_fp8 import grouped_gemm_down_fp8
from vllm_moe_modular.kernels.grouped_gemm_gated_fp8 import grouped_gemm_gated_fp8
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.grouped_gemm_down import grouped_gemm_down as down_reference
from vllm_moe_modular.reference.grouped_gemm_gated import grouped_gemm_gated as gated_reference
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8
from vllm_moe_modular.reference.quantize_fp8 import quantize_fp8 as quantize_reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

# The interpreter cuts float32 to bfloat16; a GPU's products of fp8 have fewer bits than float32.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16, torch.float32]
SILU = GatedActivation("silu")


@dataclass(frozen=True)
class Case:
    why: str
    R: int = 20
    K: int = 2
    E: int = 4
    H: int = 256
    F: int = 128
    blocks: bool = True
    activation: GatedActivation = SILU
    bias: bool = False
    weight_on_input: bool = False
    programs_per_sm: int = 0
    block_rows: int = 16
    gathered: bool = False

    def __str__(self) -> str:
        return self.why


BOTH = [
    Case("blocks"),
    Case("blocks, several across, last one of depth partial", H=400, F=384, bias=True),
    Case("blocks, rows of weights not a multiple of 16 bytes", H=200),
    Case("blocks, 64 rows", block_rows=64, R=50, bias=True),
    Case("blocks, 128 rows, persistent grid", block_rows=128, R=50, programs_per_sm=1),
    Case("blocks, top 3 of 12, biases", K=3, E=12, bias=True),
    Case("channels", blocks=False),
    Case("channels, nothing even", blocks=False, H=72, F=40, K=3, E=12, bias=True),
    Case("channels, wide, 64 rows, persistent grid", blocks=False, H=400, F=208, block_rows=64, programs_per_sm=1),
]
GATED = [
    *BOTH,
    Case("blocks, gathered", gathered=True, H=272),
    Case("blocks, gathered, 64 rows", gathered=True, block_rows=64, R=50),
    Case("blocks, weights on the input", weight_on_input=True, bias=True),
    Case("channels, weights on the input", blocks=False, weight_on_input=True, bias=True),
    Case("channels, interleaved, overhanging the next expert", blocks=False, F=40, bias=True,
         activation=GatedActivation("swiglu_oai", limit=7.0, interleaved=True)),
    Case("channels, interleaved, odd rows", blocks=False, H=66, F=38, bias=True,
         activation=GatedActivation("silu", interleaved=True)),
    *(Case(f"activation {name}", activation=GatedActivation(name, alpha=1.3, beta=0.5)) for name in NAMES),
]  # fmt: skip


def align(case: Case) -> AlignedRows:
    ids = random_ids(case.R, case.K, case.E)
    ids[1, 0], ids[2, 1], ids[3] = -1, case.E, -1
    scratch = poisoned(scratch_ints(ids.numel(), case.E, case.block_rows), dtype=torch.int32)
    return align_rows(ids, case.E, case.block_rows, scratch=scratch)


def blocks_of(rows: AlignedRows) -> list[tuple[int, int, int]]:
    return [(e, start, n) for e, start, n, _ in rows.blocks[: int(rows.totals[0])].tolist()]


def random_rows(R: int, H: int) -> torch.Tensor:
    """With groups of columns of different size, so that a scale in the wrong place shows."""
    sizes = 2 ** randn(R, -(-H // 128), dtype=torch.float32, seed=7).repeat_interleave(128, dim=1)[:, :H]
    return randn(R, H, dtype=torch.float32) * sizes


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gated_matches_reference(case: Case) -> None:
    rows = align(case)
    x = random_rows(case.R, case.H)
    S = case.R * case.K
    quantised = poisoned_fp8_rows(S if case.gathered else case.R, case.H)
    quantize_fp8(x, out=quantised, rows=rows if case.gathered else None, top_k=case.K)
    w13, scale = random_fp8_weights(case.E, 2 * case.F, case.H, blocks=case.blocks, seed=1)
    bias = randn(case.E, 2 * case.F, dtype=torch.float16, seed=2) if case.bias else None
    weights = randn(case.R, case.K, dtype=torch.float32, seed=3).abs() if case.weight_on_input else None
    out = poisoned_fp8_rows(S, case.F)
    grouped_gemm_gated_fp8(
        quantised, w13, scale, rows, out=out, top_k=case.K, activation=case.activation, bias=bias,
        topk_weights_RK=weights, block_rows=case.block_rows, tile=GemmTile(128, 128, 2, 4, 2, case.programs_per_sm),
        gathered=case.gathered,
    )  # fmt: skip

    meant = dequantize_fp8(*quantize_reference(x))

    def reference(dtype: torch.dtype) -> torch.Tensor:
        return gated_reference(
            meant.to(dtype), stand_for(w13, scale, dtype), rows.sorted_slots, blocks_of(rows), top_k=case.K,
            activation=partial(gated_activation, **asdict(case.activation)),
            bias=None if bias is None else bias.to(dtype), topk_weights_RK=weights,
        )  # fmt: skip

    n = sum(rows for _, _, rows in blocks_of(rows))
    naive = Fp8Rows(*quantize_reference(reference(torch.float32)[:n]))
    got = dequantize_fp8(out.values[:n], out.scales[:n])
    assert_as_accurate_as(got, dequantize_fp8(naive.values, naive.scales), reference(torch.float64)[:n])
    same = out.values[:n].view(torch.uint8) == naive.values.view(torch.uint8)
    assert same.float().mean() > 0.97, "more than what lies near a tie was rounded another way"
    assert out.scales[n:].isnan().all(), "a position that is in no block was written"
    assert (out.values[n:].view(torch.uint8) == 0x7F).all(), "a position that is in no block was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_down_matches_reference(case: Case, columns: int, dtype: torch.dtype) -> None:
    rows = align(case)
    n = sum(rows for _, _, rows in blocks_of(rows))
    S = case.R * case.K
    x = poisoned_fp8_rows(S, case.F)  # past n: rows that the first GEMM did not write
    values, scales = quantize_reference(random_rows(n, case.F))
    x.values.view(torch.uint8)[:n], x.scales[:n] = values.view(torch.uint8), scales
    w2, scale = random_fp8_weights(case.E, case.H, case.F, blocks=case.blocks, seed=1)
    bias = randn(case.E, case.H, dtype=dtype, seed=2) if case.bias else None
    out = poisoned(S, case.H, dtype=dtype)
    tile = GemmTile(columns, 128, 2, 4, 2, case.programs_per_sm)
    grouped_gemm_down_fp8(x, w2, scale, rows, out_SH=out, bias=bias, block_rows=case.block_rows, tile=tile)

    meant = dequantize_fp8(x.values, x.scales)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        b = None if bias is None else bias.to(dtype)
        return down_reference(
            meant.to(dtype), stand_for(w2, scale, dtype), rows.sorted_slots, blocks_of(rows), bias=b
        )  # fmt: skip

    here = rows.sorted_slots[:n].long()
    assert_as_accurate_as(out[here], reference(dtype)[here], reference(torch.float64)[here])
    assert out.isnan().all(dim=1).sum() == S - n, "a slot that is in no block was written"

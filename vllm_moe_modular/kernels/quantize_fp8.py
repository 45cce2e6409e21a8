"""Rows in fp8: float8_e4m3fn values, and a float32 scale for each row and 128 columns.

    largest[r, g] = max of |x[r, h]| over h // 128 == g, at least 2**-100
    values[r, h]  = x[r, h] * (448 / largest[r, h // 128]), to the nearest, ties to even
    scales[r, g]  = largest[r, g] / 448

448 is the largest finite float8_e4m3fn, so nothing saturates but by rounding. `quantized` is the same for the epilogue
of another kernel. With `rows` the copy is in the order of the experts: row p is x[sorted_slots[p] // K, :], for each
position p that is in a block.

Shapes: R rows, K top-k, S = R * K slots, H columns, G = H / 128 rounded up.
Cost:   memory bound; R * H read, R * H bytes and 4 * R * G bytes of scales written; S instead of R with `rows`.
Reference: vllm_moe_modular.reference.quantize_fp8.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows

GROUP = 128
"""Columns that share a scale: the scale block of the checkpoint format, and what the GEMMs take per step of depth."""

_GROUP = tl.constexpr(GROUP)
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Row r, column h stands for values[r, h] * scales[r, h // 128].

    Attributes:
        values: [R, H] float8_e4m3fn, contiguous.
        scales: [R, H/128 rounded up] float32, contiguous unless it is said that other strides will do.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def nbytes(rows: int, columns: int) -> int:
        """What `within` takes."""
        return _aligned(rows * columns) + rows * math.ceil(columns / GROUP) * 4

    @classmethod
    def within(cls, scratch: torch.Tensor, rows: int, columns: int) -> "Fp8Rows":
        """Uninitialised ones in the first bytes of a contiguous tensor of any dtype."""
        pool = scratch.flatten().view(torch.uint8)[: cls.nbytes(rows, columns)]
        values, scales = pool[: rows * columns], pool[_aligned(rows * columns) :]
        return cls(values.view(torch.float8_e4m3fn).view(rows, columns), scales.view(torch.float32).view(rows, -1))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Tile:
    block_g: int  # groups of columns per program
    num_warps: int


def choose_tile(*, rows: int, columns: int) -> Tile:
    """Pure and CPU-testable. Few rows: narrow tiles, so that every multiprocessor has some."""
    widest = 16 if rows >= 1024 else 4
    block_g = min(widest, triton.next_power_of_2(triton.cdiv(columns, GROUP)))
    return Tile(block_g=block_g, num_warps=max(1, block_g // 2))


@triton.jit
def quantized(x):
    """[N, 128] float32 to [N, 128] float8_e4m3fn and [N] scales."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 7.888609052210118e-31)  # 2**-100
    values = x * tl.div_rn(448.0, largest)[:, None]
    return values.to(tl.float8e4nv), tl.div_rn(largest, 448.0)


@triton.jit
def _quantize_fp8_kernel(
    values_ptr,  # [R, H], or [S, H]
    scales_ptr,  # [R, G], or [S, G]
    x_ptr,  # [R, H]
    sorted_ptr,  # [S], or None: keep the order
    totals_ptr,  # [2] blocks, positions; or None
    stride_x_r,
    H,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups = tl.cdiv(H, _GROUP)
    tiles_g = tl.cdiv(groups, BLOCK_G)
    # int64 before any multiply: slots x hidden passes 2**31.
    p = (tl.program_id(0) // tiles_g).to(tl.int64)
    row = p
    here = True
    if sorted_ptr is not None:
        here = p < tl.load(totals_ptr + 1)
        row = (tl.load(sorted_ptr + p, mask=here, other=0) // K).to(tl.int64)
    if here:
        g = tl.program_id(0) % tiles_g * BLOCK_G + tl.arange(0, BLOCK_G)
        h = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        x = tl.load(x_ptr + row * stride_x_r + h, mask=h < H, other=0.0).to(tl.float32)
        values, scales = quantized(x)
        tl.store(values_ptr + p * H + h, values, mask=h < H)
        tl.store(scales_ptr + p * groups + g, scales, mask=g < groups)


def quantize_fp8(
    x_RH: torch.Tensor, *, out: Fp8Rows, rows: AlignedRows | None = None, top_k: int = 1, pdl: bool = False
) -> None:
    """Write every row of `out`; with `rows`, each that is in a block, and leave others alone.

    Args:
        x_RH: [R, H], rows contiguous; bfloat16, float16 or float32.
        out: [R, H]; with `rows` [S, H].
        rows: the order to copy in; None: that of `x_RH`.
        top_k: K, where `rows` is given.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    N, H = out.values.shape
    tile = choose_tile(rows=N, columns=H)
    grid = (N * triton.cdiv(triton.cdiv(H, GROUP), tile.block_g),)
    _quantize_fp8_kernel[grid](
        out.values, out.scales, x_RH,
        None if rows is None else rows.sorted_slots, None if rows is None else rows.totals, x_RH.stride(0), H,
        K=top_k, BLOCK_G=tile.block_g, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip


def rows_in_fp8(x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [R, H] and scales [R, H/128 rounded up] of all rows, newly allocated, as libraries take them."""
    R, H = x_RH.shape
    out = Fp8Rows(
        torch.empty_like(x_RH, dtype=torch.float8_e4m3fn),
        torch.empty((R, triton.cdiv(H, GROUP)), dtype=torch.float32, device=x_RH.device),
    )
    quantize_fp8(x_RH, out=out)
    return out.values, out.scales

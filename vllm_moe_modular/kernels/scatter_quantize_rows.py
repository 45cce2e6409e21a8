"""`scatter_rows` with the rows quantised on the way, each once however many slots it has.

    out[p, :], scales[:, p] = quantize_fp8(x[r, :])      for each p = positions[r, k] that is not -1

Rows that are in fp8 already are copied, with their scales. The scales lie with the rows side by side, as the copy
engine of a GEMM reads them: a row of `scales` per group.

Shapes: R rows, K top-k, S = R * K slots, H hidden, P rows of the layout.
Cost:   memory bound; R * H * 2 bytes read (half of it in fp8), S * H + S * H / 32 written.
Reference: vllm_moe_modular.reference.scatter_rows over vllm_moe_modular.reference.quantize_fp8.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.quantize_fp8 import GROUP, quantized


@dataclass(frozen=True, slots=True)
class Tile:
    groups: int  # of a row, per program
    num_warps: int


def choose_tile(*, hidden: int) -> Tile:
    """Pure and CPU-testable."""
    groups = min(16, triton.next_power_of_2(hidden // GROUP))
    return Tile(groups=groups, num_warps=max(1, groups // 2))


@triton.jit
def _scatter_quantize_rows_kernel(
    out_ptr,  # [P, H] float8_e4m3fn
    scales_ptr,  # [H / 128, P]
    x_ptr,  # [R, H]
    x_scale_ptr,  # [R, H / 128], or None: x is not in fp8
    positions_ptr,  # [R, K]
    stride_x_r,
    stride_scale_r,
    stride_scale_g,
    H,
    P,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_g = tl.cdiv(H, BLOCK_G * GROUP)
    # int64 before any multiply: rows x hidden passes 2**31.
    r = (tl.program_id(0) // tiles_g).to(tl.int64)
    g = tl.program_id(0) % tiles_g * BLOCK_G + tl.arange(0, BLOCK_G)
    in_g = g * GROUP < H
    h = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    furthest = -1
    for k in tl.static_range(K):
        furthest = tl.maximum(furthest, tl.load(positions_ptr + r * K + k))
    if furthest >= 0:
        x = tl.load(x_ptr + r * stride_x_r + h, mask=in_g[:, None], other=0.0)
        if x_scale_ptr is None:
            q, scale = quantized(x.to(tl.float32))
        else:
            q = x
            scale = tl.load(x_scale_ptr + r * stride_scale_r + g * stride_scale_g, mask=in_g, other=0.0)
        for k in tl.static_range(K):
            p = tl.load(positions_ptr + r * K + k).to(tl.int64)
            here = in_g & (p >= 0)
            tl.store(out_ptr + p * H + h, q, mask=here[:, None])
            tl.store(scales_ptr + g.to(tl.int64) * P + p, scale, mask=here)


def scatter_quantize_rows(
    x_RH: torch.Tensor,
    positions: torch.Tensor,
    *,
    out_PH: torch.Tensor,
    scales_GP: torch.Tensor,
    x_scale_RG: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """Write the row and the scales of each slot.

    Args:
        x_RH: [R, H], rows contiguous; R > 0, H a multiple of 128.
        x_scale_RG: [R, H / 128] float32, any strides, for x in float8_e4m3fn; None: x is to be quantised.
        positions: [R * K] int32; -1: the slot has no row.
        out_PH: [P, H] float8_e4m3fn, contiguous.
        scales_GP: [H / 128, P] float32, contiguous.
        pdl: start early and wait inside for the kernel before.
    """
    R, H = x_RH.shape
    tile = tile or choose_tile(hidden=H)
    _scatter_quantize_rows_kernel[(R * triton.cdiv(H, tile.groups * GROUP),)](
        out_PH, scales_GP, x_RH, x_scale_RG, positions,
        x_RH.stride(0), *((0, 0) if x_scale_RG is None else x_scale_RG.stride()), H, out_PH.shape[0],
        K=positions.numel() // R, BLOCK_G=tile.groups, GROUP=GROUP, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

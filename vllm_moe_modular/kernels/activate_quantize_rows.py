"""`activate_rows` with the result quantised before it is written.

    out[p, :], scales[:, p] = quantize_fp8(activation(w * gate_up[p, :]))      for each slot that has a position p

The scales lie with the rows side by side, as the copy engine of a GEMM reads them: a row of `scales` per group.

Shapes: R rows, K top-k, S = R * K slots, F expert intermediate, P rows of the layout.
Cost:   memory bound; S * 2F * 2 bytes read, S * F + S * F / 32 written.
Reference: vllm_moe_modular.reference.quantize_fp8 over vllm_moe_modular.reference.activate_rows.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, quantized


@dataclass(frozen=True, slots=True)
class Tile:
    slots: int  # per program
    groups: int  # of each slot
    num_warps: int


def choose_tile(intermediate: int) -> Tile:
    """Pure and CPU-testable. 16 groups per program, and none of them past the end of a row: those would idle."""
    groups = math.gcd(16, intermediate // GROUP)
    return Tile(slots=16 // groups, groups=groups, num_warps=4)


@triton.jit
def _activate_quantize_rows_kernel(
    out_ptr,  # [P, F] float8_e4m3fn
    scales_ptr,  # [F / 128, P]
    gate_up_ptr,  # [P, 2F]
    positions_ptr,  # [S]
    topk_weights_ptr,  # [S] float32, or None
    S,
    F,
    P,
    limit,
    alpha,
    beta,
    NAME: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes TILE_SLOTS x BLOCK_G groups, [J, 128]."""
    tiles_g = tl.cdiv(F, BLOCK_G * GROUP)
    j = tl.arange(0, TILE_SLOTS * BLOCK_G)
    slot = tl.program_id(0) // tiles_g * TILE_SLOTS + j // BLOCK_G
    g = tl.program_id(0) % tiles_g * BLOCK_G + j % BLOCK_G
    f = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # int64 before any multiply: rows x intermediate passes 2**31.
    p = tl.load(positions_ptr + slot, mask=slot < S, other=-1).to(tl.int64)
    here = (p >= 0) & (g * GROUP < F)
    gate_ptrs = gate_up_ptr + p[:, None] * 2 * F + (2 * f if INTERLEAVED else f)
    gate = tl.load(gate_ptrs, mask=here[:, None], other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + (1 if INTERLEAVED else F), mask=here[:, None], other=0.0).to(tl.float32)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + slot, mask=here, other=0.0)[:, None]
        gate *= weight
        up *= weight
    y = gated_activation(gate, up, limit, alpha, beta, NAME=NAME, HAS_LIMIT=HAS_LIMIT)
    q, scale = quantized(y)
    tl.store(out_ptr + p[:, None] * F + f, q, mask=here[:, None])
    tl.store(scales_ptr + g.to(tl.int64) * P + p, scale, mask=here)


def activate_quantize_rows(
    gate_up_PN: torch.Tensor,
    positions: torch.Tensor,
    *,
    out_PF: torch.Tensor,
    scales_GP: torch.Tensor,
    activation: GatedActivation,
    topk_weights: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """Write the activated row of each slot and its scales.

    Args:
        gate_up_PN: [P, 2F], contiguous; F a multiple of 128.
        positions: [S] int32, S > 0; -1: the slot has no row.
        out_PF: [P, F] float8_e4m3fn, contiguous.
        scales_GP: [F / 128, P] float32, contiguous.
        topk_weights: S elements, float32, contiguous: multiply gate and up first; None: 1.
        pdl: start early and wait inside for the kernel before.
    """
    P, F = out_PF.shape
    S = positions.numel()
    tile = tile or choose_tile(F)
    grid = (triton.cdiv(S, tile.slots) * triton.cdiv(F, tile.groups * GROUP),)
    _activate_quantize_rows_kernel[grid](
        out_PF, scales_GP, gate_up_PN, positions, topk_weights, S, F, P,
        activation.limit or 0.0, activation.alpha, activation.beta,
        NAME=activation.name, HAS_LIMIT=activation.limit is not None, INTERLEAVED=activation.interleaved,
        TILE_SLOTS=tile.slots, BLOCK_G=tile.groups, GROUP=GROUP, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

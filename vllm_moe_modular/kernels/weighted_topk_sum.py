"""Weighted sum of each row's top-k expert rows: the last step of the standard format.

    out[r, :] = sum over k with 0 <= topk_ids[r, k] < E of topk_weights[r, k] * y[r, k, :]

`positions`, where given, say in which row of y that is: y[positions[r, k], :].

What lies behind an id that is not here, row and weight, is never read.

Shapes: R rows, K top-k, H hidden, E experts.
Cost:   memory bound; `traffic_bytes` is the floor.
Reference: vllm_moe_modular.reference.weighted_topk_sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    block_h: int  # hidden columns per program
    num_warps: int


def choose_tile(rows: int, hidden: int) -> Tile:
    """Pure and CPU-testable. Few rows: narrow tiles, so that every multiprocessor has one."""
    widest = 1024 if rows >= 512 else 256
    block_h = min(widest, triton.next_power_of_2(hidden))
    return Tile(block_h=block_h, num_warps=max(1, block_h // 512))


@triton.jit
def _weighted_topk_sum_kernel(
    out_ptr,  # [R, H]
    y_ptr,  # [R, K, H], or [P, H] with positions
    ids_ptr,  # [R, K] int32 or int64
    weights_ptr,  # [R, K] float32, or None
    positions_ptr,  # [R, K] int32, or None
    H,
    E,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_h = tl.cdiv(H, BLOCK_H)
    # int64 before any multiply: rows x top-k x hidden passes 2**31.
    r = (tl.program_id(0) // tiles_h).to(tl.int64)
    h = tl.program_id(0) % tiles_h * BLOCK_H + tl.arange(0, BLOCK_H)
    in_h = h < H
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for k in tl.static_range(K):
        e = tl.load(ids_ptr + r * K + k)
        here = (e >= 0) & (e < E)
        row = r * K + k
        if positions_ptr is not None:
            row = tl.load(positions_ptr + row, mask=here, other=0).to(tl.int64)
        # A masked load, not a branch, so that all K loads are in flight; what is not here is not read.
        term = tl.load(y_ptr + row * H + h, mask=in_h & here, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            term *= tl.load(weights_ptr + r * K + k, mask=here, other=0.0)
        acc += term
    tl.store(out_ptr + r * H + h, acc.to(out_ptr.dtype.element_ty), mask=in_h)


def weighted_topk_sum(
    y_SH: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor | None,
    *,
    num_experts: int,
    out_RH: torch.Tensor,
    positions: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Accumulates in float32, rounds once to the dtype of `out_RH`, writes every element of it.

    Args:
        y_SH: [R * K, H], contiguous, or of as many rows as there are positions to point at; rows of slots that are
            not here may be uninitialised.
        topk_ids_RK: [R, K], contiguous.
        topk_weights_RK: [R, K] float32, contiguous; None: the sum is unweighted.
        num_experts: ids from here on are left out, as are ids below 0.
        out_RH: [R, H], contiguous.
        positions: [R * K] int32, the row of each slot that is here; None: slot after slot.
        pdl: start early and wait inside for the kernel before.
    """
    R, K = topk_ids_RK.shape
    H = y_SH.shape[1]
    tile = choose_tile(R, H)
    grid = (R * triton.cdiv(H, tile.block_h),)
    _weighted_topk_sum_kernel[grid](
        out_RH, y_SH, topk_ids_RK, topk_weights_RK, positions, H, num_experts,
        K=K, BLOCK_H=tile.block_h, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip


def traffic_bytes(R: int, K: int, H: int, itemsize: int) -> int:
    """Bytes that a perfect implementation moves."""
    return R * K * H * itemsize + R * H * itemsize + R * K * (4 + 4)

"""Copy each row to the positions of its slots: the layout that a grouped GEMM over whole blocks of rows reads.

    out[positions[r, k], :] = x[r, :]      for each slot that has a position

Rows of `out` that are no slot's are left alone.

Shapes: R rows, K top-k, S = R * K slots, H hidden, P rows of the layout.
Cost:   memory bound; R * H read once, S * H written.
Reference: vllm_moe_modular.reference.scatter_rows.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _scatter_rows_kernel(
    out_ptr,  # [P, H]
    x_ptr,  # [R, H]
    positions_ptr,  # [R, K]
    stride_x_r,
    H,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_h = tl.cdiv(H, BLOCK_H)
    # int64 before any multiply: rows x hidden passes 2**31.
    r = (tl.program_id(0) // tiles_h).to(tl.int64)
    h = tl.program_id(0) % tiles_h * BLOCK_H + tl.arange(0, BLOCK_H)
    if PDL:
        tl.extra.cuda.gdc_wait()
    furthest = -1
    for k in tl.static_range(K):
        furthest = tl.maximum(furthest, tl.load(positions_ptr + r * K + k))
    if furthest >= 0:
        x = tl.load(x_ptr + r * stride_x_r + h, mask=h < H)
        for k in tl.static_range(K):
            p = tl.load(positions_ptr + r * K + k).to(tl.int64)
            tl.store(out_ptr + p * H + h, x, mask=(h < H) & (p >= 0))


def scatter_rows(x_RH: torch.Tensor, positions: torch.Tensor, *, out_PH: torch.Tensor, pdl: bool = False) -> None:
    """Write the row of each slot.

    Args:
        x_RH: [R, H], rows contiguous; R > 0.
        positions: [R * K] int32; -1: the slot has no row.
        out_PH: [P, H], contiguous, dtype of `x_RH`.
        pdl: start early and wait inside for the kernel before.
    """
    R, H = x_RH.shape
    block_h = min(2048, triton.next_power_of_2(H))
    _scatter_rows_kernel[(R * triton.cdiv(H, block_h),)](
        out_PH, x_RH, positions, x_RH.stride(0), H,
        K=positions.numel() // R, BLOCK_H=block_h, PDL=pdl, num_warps=max(1, block_h // 256), launch_pdl=pdl,
    )  # fmt: skip

"""Copy each slot's row into the order of the experts, for a first GEMM that reads its rows by the copy engine.

    out[p, :] = x[sorted_slots[p] // K, :]      for each position p that is in a block

Of any dtype: of rows in fp8 it copies the values, then the scales. Pays where the GEMM is long enough: the copy costs
S * H * 2 elements moved, and spares every tile the gather.

Shapes: R rows, K top-k, S = R * K slots, H hidden.
Cost:   memory bound; S * H written, S * H read, of which all but R * H from L2.
Reference: vllm_moe_modular.reference.gather_rows.
"""

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows


@triton.jit
def _gather_rows_kernel(
    out_ptr,  # [S, H]
    x_ptr,  # [R, H]
    sorted_ptr,  # [S]
    totals_ptr,  # [2] blocks, positions
    stride_x_r,
    H,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    if p < tl.load(totals_ptr + 1):
        # int64 before the multiply: slots x hidden passes 2**31.
        row = (tl.load(sorted_ptr + p) // K).to(tl.int64)
        for h0 in range(0, H, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            x = tl.load(x_ptr + row * stride_x_r + h, mask=h < H)
            tl.store(out_ptr + p.to(tl.int64) * H + h, x, mask=h < H)


def gather_rows(x_RH: torch.Tensor, rows: AlignedRows, *, top_k: int, out_SH: torch.Tensor, pdl: bool = False) -> None:
    """Write row p of `out_SH` for each position p that is in a block; other rows are left alone.

    Args:
        x_RH: [R, H], rows contiguous.
        out_SH: [S, H], contiguous, dtype of `x_RH`.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    S, H = out_SH.shape
    block_h = min(2048, triton.next_power_of_2(H))
    _gather_rows_kernel[(S,)](
        out_SH, x_RH, rows.sorted_slots, rows.totals, x_RH.stride(0), H,
        K=top_k, BLOCK_H=block_h, PDL=pdl, num_warps=max(1, block_h // 256), launch_pdl=pdl,
    )  # fmt: skip

"""`quantize_fp8` for the real rows of the batched format, which `blocks_of_batch` cut into blocks.

    values[e, c, :], scales[e, c, :] = quantize_fp8(x[e, c, :])      for each row c of expert e that is in a block

Rows that are in fp8 already are copied, with their scales: into another layout of the scales, or blocks of another
capacity.

Shapes: E experts, C capacity per expert of x, D of the result, H columns, G = H / 128 rounded up, B blocks.
Cost:   memory bound; of every real row H read, H bytes and 4 * G bytes of scales written. As many programs as run at a
        time go through the blocks, so that rows that are not real cost nothing.
Reference: vllm_moe_modular.reference.quantize_fp8, block by block.
"""

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.launch import grid_over
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, quantized

PROGRAMS_PER_SM = 16
"""Of four warps each: all that a multiprocessor of Hopper holds."""


@triton.jit
def _quantize_batch_kernel(
    values_ptr,  # [E, D, H] fp8
    scales_ptr,  # [E, D, G]
    x_ptr,  # [E, C, H]
    x_scale_ptr,  # [E, C, G], or None: x is not in fp8
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    stride_scale_e,
    stride_scale_d,
    stride_scale_g,
    stride_x_scale_e,
    stride_x_scale_c,
    stride_x_scale_g,
    C,
    D,
    H,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups = tl.cdiv(H, GROUP)
    for tile in range(tl.program_id(0), tl.load(totals_ptr) * groups, tl.num_programs(0)):
        block_ptr = blocks_ptr + tile // groups * 4
        g = tile % groups
        # int64 before any multiply: experts x capacity x hidden passes 2**31.
        e = tl.load(block_ptr).to(tl.int64)
        c = tl.load(block_ptr + 1) - e * C + tl.arange(0, BLOCK_R)
        in_r = tl.arange(0, BLOCK_R) < tl.load(block_ptr + 2)
        h = g * GROUP + tl.arange(0, GROUP)
        in_x = in_r[:, None] & (h < H)[None, :]
        x = tl.load(x_ptr + (e * C + c)[:, None] * H + h[None, :], mask=in_x, other=0.0)
        if x_scale_ptr is None:
            x, scales = quantized(x.to(tl.float32))
        else:
            from_ptrs = x_scale_ptr + e * stride_x_scale_e + c * stride_x_scale_c + g * stride_x_scale_g
            scales = tl.load(from_ptrs, mask=in_r, other=0.0)
        tl.store(values_ptr + (e * D + c)[:, None] * H + h[None, :], x, mask=in_x)
        to_ptrs = scales_ptr + e * stride_scale_e + c * stride_scale_d + g * stride_scale_g
        tl.store(to_ptrs, scales, mask=in_r)


def quantize_batch(
    x_ECH: torch.Tensor,
    blocks: AlignedRows,
    *,
    out_EDH: torch.Tensor,
    scales_EDG: torch.Tensor,
    x_scale_ECG: torch.Tensor | None = None,
    block_rows: int,
    pdl: bool = False,
) -> None:
    """Write the values and the scales of every row in a block, and leave others alone.

    Args:
        x_ECH: [E, C, H], contiguous; bfloat16, float16 or float32, or float8_e4m3fn with `x_scale_ECG`.
        blocks: of `blocks_of_batch`.
        out_EDH: [E, D, H] float8_e4m3fn, contiguous; D at least C.
        scales_EDG: [E, D, G] float32, any strides.
        x_scale_ECG: [E, C, G] float32, any strides; None: x is to be quantised.
        block_rows: what `blocks` was cut with.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    C, (_, D, H) = x_ECH.shape[1], out_EDH.shape
    grid = grid_over(
        blocks.blocks.shape[0] * triton.cdiv(H, GROUP), x_ECH.device, programs_per_sm=PROGRAMS_PER_SM
    )  # fmt: skip
    _quantize_batch_kernel[grid](
        out_EDH, scales_EDG, x_ECH, x_scale_ECG, blocks.blocks, blocks.totals,
        *scales_EDG.stride(), *((0, 0, 0) if x_scale_ECG is None else x_scale_ECG.stride()), C, D, H,
        BLOCK_R=block_rows, GROUP=GROUP, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip

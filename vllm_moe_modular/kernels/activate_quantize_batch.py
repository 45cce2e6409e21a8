"""The gated activation over the real rows of the batched format, quantised before it is written.

    out[e, d, :], scales[e, d, :] = quantize_fp8(activation(gate_up[e, d, :]))      for each row d that is in a block

Shapes: E experts, C capacity per expert that the blocks were cut for, D of the tensors, F expert intermediate,
        J = F / 128, B blocks.
Cost:   memory bound; of every real row 2F * 2 bytes read, F + F / 32 written. As many programs as run at a time go
        through the blocks, so that rows that are not real cost nothing.
Reference: vllm_moe_modular.reference.quantize_fp8 over vllm_moe_modular.reference.gated_activation.
"""

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation
from vllm_moe_modular.kernels.launch import grid_over
from vllm_moe_modular.kernels.quantize_batch import PROGRAMS_PER_SM
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, quantized


@triton.jit
def _activate_quantize_batch_kernel(
    out_ptr,  # [E, D, F] fp8
    scales_ptr,  # [E, D, J]
    gate_up_ptr,  # [E, D, 2F]
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    stride_scale_e,
    stride_scale_d,
    stride_scale_j,
    limit,
    alpha,
    beta,
    C,
    D,
    F,
    NAME: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    groups = F // GROUP
    for tile in range(tl.program_id(0), tl.load(totals_ptr) * groups, tl.num_programs(0)):
        block_ptr = blocks_ptr + tile // groups * 4
        j = tile % groups
        # int64 before any multiply: experts x capacity x intermediate passes 2**31.
        e = tl.load(block_ptr).to(tl.int64)
        d = tl.load(block_ptr + 1) - e * C + tl.arange(0, BLOCK_R)
        in_r = tl.arange(0, BLOCK_R) < tl.load(block_ptr + 2)
        f = j * GROUP + tl.arange(0, GROUP)
        row = (e * D + d)[:, None]
        gate_ptrs = gate_up_ptr + row * 2 * F + (2 * f if INTERLEAVED else f)[None, :]
        gate = tl.load(gate_ptrs, mask=in_r[:, None], other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + (1 if INTERLEAVED else F), mask=in_r[:, None], other=0.0).to(tl.float32)
        y = gated_activation(gate, up, limit, alpha, beta, NAME=NAME, HAS_LIMIT=HAS_LIMIT)
        values, scales = quantized(y)
        tl.store(out_ptr + row * F + f[None, :], values, mask=in_r[:, None])
        tl.store(scales_ptr + e * stride_scale_e + d * stride_scale_d + j * stride_scale_j, scales, mask=in_r)


def activate_quantize_batch(
    gate_up_EDN: torch.Tensor,
    blocks: AlignedRows,
    *,
    capacity: int,
    out_EDF: torch.Tensor,
    scales_EDJ: torch.Tensor,
    activation: GatedActivation,
    block_rows: int,
    pdl: bool = False,
) -> None:
    """Write the activated row and the scales of every row in a block, and leave others alone.

    Args:
        gate_up_EDN: [E, D, 2F], contiguous; F a multiple of 128.
        blocks: of `blocks_of_batch`.
        capacity: C, at most D.
        out_EDF: [E, D, F] float8_e4m3fn, contiguous.
        scales_EDJ: [E, D, F / 128] float32, any strides.
        block_rows: what `blocks` was cut with.
        pdl: start early and wait inside for the kernel before.
    """
    _, D, F = out_EDF.shape
    grid = grid_over(blocks.blocks.shape[0] * (F // GROUP), out_EDF.device, programs_per_sm=PROGRAMS_PER_SM)
    _activate_quantize_batch_kernel[grid](
        out_EDF, scales_EDJ, gate_up_EDN, blocks.blocks, blocks.totals, *scales_EDJ.stride(),
        activation.limit or 0.0, activation.alpha, activation.beta, capacity, D, F,
        NAME=activation.name, HAS_LIMIT=activation.limit is not None, INTERLEAVED=activation.interleaved,
        BLOCK_R=block_rows, GROUP=GROUP, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip

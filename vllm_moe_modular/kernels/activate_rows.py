"""The gated activation over the rows of a layout with gaps, which are skipped.

    out[p, :] = activation(w * gate_up[p, :])      for each slot that has a position p; w its router weight, or 1

Shapes: R rows, K top-k, S = R * K slots, F expert intermediate, P rows of the layout.
Cost:   memory bound; S * 2F read, S * F written.
Reference: vllm_moe_modular.reference.activate_rows.
"""

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation


@triton.jit
def _activate_rows_kernel(
    out_ptr,  # [P, F]
    gate_up_ptr,  # [P, 2F]
    positions_ptr,  # [S]
    topk_weights_ptr,  # [S] float32, or None
    F,
    limit,
    alpha,
    beta,
    NAME: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_f = tl.cdiv(F, BLOCK_F)
    slot = tl.program_id(0) // tiles_f
    f = tl.program_id(0) % tiles_f * BLOCK_F + tl.arange(0, BLOCK_F)
    in_f = f < F
    if PDL:
        tl.extra.cuda.gdc_wait()
    # int64 before any multiply: rows x intermediate passes 2**31.
    p = tl.load(positions_ptr + slot).to(tl.int64)
    if p >= 0:
        gate_ptrs = gate_up_ptr + p * 2 * F + (2 * f if INTERLEAVED else f)
        gate = tl.load(gate_ptrs, mask=in_f, other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + (1 if INTERLEAVED else F), mask=in_f, other=0.0).to(tl.float32)
        if topk_weights_ptr is not None:
            weight = tl.load(topk_weights_ptr + slot)
            gate *= weight
            up *= weight
        y = gated_activation(gate, up, limit, alpha, beta, NAME=NAME, HAS_LIMIT=HAS_LIMIT)
        tl.store(out_ptr + p * F + f, y.to(out_ptr.dtype.element_ty), mask=in_f)


def activate_rows(
    gate_up_PN: torch.Tensor,
    positions: torch.Tensor,
    *,
    out_PF: torch.Tensor,
    activation: GatedActivation,
    topk_weights: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the activated row of each slot; in float32 up to the last rounding.

    Args:
        gate_up_PN: [P, 2F], contiguous.
        positions: [S] int32, S > 0; -1: the slot has no row.
        out_PF: [P, F], contiguous.
        topk_weights: S elements, float32, contiguous: multiply gate and up first; None: 1.
        pdl: start early and wait inside for the kernel before.
    """
    F = out_PF.shape[1]
    block_f = min(1024, triton.next_power_of_2(F))
    _activate_rows_kernel[(positions.numel() * triton.cdiv(F, block_f),)](
        out_PF, gate_up_PN, positions, topk_weights, F, activation.limit or 0.0, activation.alpha, activation.beta,
        NAME=activation.name, HAS_LIMIT=activation.limit is not None, INTERLEAVED=activation.interleaved,
        BLOCK_F=block_f, PDL=pdl, num_warps=max(1, block_f // 512), launch_pdl=pdl,
    )  # fmt: skip

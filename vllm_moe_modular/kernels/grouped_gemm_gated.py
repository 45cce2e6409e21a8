"""Gather rows, first grouped GEMM, bias and gated activation in one kernel: the 2F columns are never written.

    row = sorted_slots[p] // K
    [gate | up][p, :] = x[row, :] @ w13[e].T (* weight[slot]) + w13_bias[e]      e = the expert of p's block
    y[p, f] = activation(gate[p, f], up[p, f])

One product of width 2 * block_f gives gate and up side by side. Packed weights (all gates, then all ups) are read as
[E * 2, F, H], two boxes of block_f rows; interleaved ones as [1, E * 2F, H], one box of 2 * block_f rows.

Shapes: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E experts, B blocks.
Cost:   S * 2F * H * 2 operations; bytes: every active expert's 2F * H weights once, S * H rows read, S * F written.
Reference: vllm_moe_modular.reference.grouped_gemm_gated.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.launch import grid_of, takes_descriptor, tile_in_group


@triton.jit
def _grouped_gemm_gated_kernel(
    y_ptr,  # [S, F]
    x_ptr,  # [R, H], or the tensor descriptor of gathered rows [S, H]
    w_ptr,  # [E, 2F, H], or its tensor descriptor
    bias_ptr,  # [E, 2F] or None
    topk_weights_ptr,  # [S] or None
    sorted_ptr,  # [S], or None: positions are slots
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    limit,
    alpha,
    beta,
    stride_x_r,
    H,
    F,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    X_IS_DESCRIPTOR: tl.constexpr,
    W_IS_DESCRIPTOR: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_blocks = tl.load(totals_ptr)
    tiles_f = tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), num_blocks * tiles_f, tl.num_programs(0), flatten=FLATTEN):
        b, tile_f = tile_in_group(tile, num_blocks, tiles_f, GROUP_R)
        f0 = tile_f * BLOCK_F
        e = tl.load(blocks_ptr + b * 4)
        start = tl.load(blocks_ptr + b * 4 + 1)
        rows = tl.load(blocks_ptr + b * 4 + 2)
        r = tl.arange(0, BLOCK_R)
        in_r = r < rows
        h = tl.arange(0, BLOCK_H)
        if not X_IS_DESCRIPTOR:
            if sorted_ptr is None:  # noqa: SIM108 - only one side may be compiled
                slot = start + r
            else:
                slot = tl.load(sorted_ptr + start + r, mask=in_r, other=0)
            # int64 before the multiply: rows x hidden passes 2**31.
            x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * stride_x_r + h[None, :]
        if not W_IS_DESCRIPTOR:
            c = tl.arange(0, 2 * BLOCK_F)
            if INTERLEAVED:
                column = 2 * f0 + c
                in_c = column < 2 * F
            else:
                in_c = f0 + c % BLOCK_F < F
                column = c // BLOCK_F * F + f0 + c % BLOCK_F
            w_ptrs = w_ptr + (e.to(tl.int64) * 2 * F + column)[:, None] * H + h[None, :]

        acc = tl.zeros([BLOCK_R, 2 * BLOCK_F], dtype=tl.float32)
        for h0 in tl.range(0, H, BLOCK_H, num_stages=NUM_STAGES):
            if X_IS_DESCRIPTOR:
                # Rows past the block's own are the next expert's, or were never written: they are not stored.
                x = x_ptr.load([start, h0])
            elif EVEN_H:
                x = tl.load(x_ptrs + h0, mask=in_r[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + h0, mask=in_r[:, None] & (h0 + h < H)[None, :], other=0.0)
            if not W_IS_DESCRIPTOR:
                w = tl.load(w_ptrs + h0, mask=in_c[:, None] & (h0 + h < H)[None, :], other=0.0)
            elif INTERLEAVED:
                w = w_ptr.load([e * 2 * F + 2 * f0, h0])
            else:
                w = w_ptr.load([e * 2, f0, h0]).reshape(2 * BLOCK_F, BLOCK_H)
            if x.dtype == tl.float32:
                # One chain of sums over all of H is three times as wrong as torch; a chain per step is not. `where`
                # keeps the compiler from making one of them.
                acc += tl.where(in_r[:, None], tl.dot(x, w.T, input_precision="ieee"), 0.0)
            else:
                acc = tl.dot(x, w.T, acc, input_precision="ieee")

        if topk_weights_ptr is not None:
            its_slot = tl.load(sorted_ptr + start + r, mask=in_r, other=0)
            acc *= tl.load(topk_weights_ptr + its_slot, mask=in_r, other=0.0)[:, None]
        if INTERLEAVED:
            gate, up = acc.reshape(BLOCK_R, BLOCK_F, 2).split()
        else:
            gate, up = acc.reshape(BLOCK_R, 2, BLOCK_F).permute(0, 2, 1).split()
        f = f0 + tl.arange(0, BLOCK_F)
        in_f = f < F
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + e.to(tl.int64) * 2 * F
            gate_at, up_at = (2 * f, 2 * f + 1) if INTERLEAVED else (f, F + f)
            gate += tl.load(bias_ptrs + gate_at, mask=in_f, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptrs + up_at, mask=in_f, other=0.0).to(tl.float32)[None, :]
        EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
        y = gated_activation(gate, up, limit, alpha, beta, ACTIVATION, HAS_LIMIT, EXACT)
        y_ptrs = y_ptr + (start + r).to(tl.int64)[:, None] * F + f[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_r[:, None] & in_f[None, :])


def grouped_gemm_gated(
    x_RH: torch.Tensor,
    w13: torch.Tensor,
    rows: AlignedRows,
    *,
    out_SF: torch.Tensor,
    top_k: int,
    activation: GatedActivation,
    bias: torch.Tensor | None = None,
    topk_weights_RK: torch.Tensor | None = None,
    block_rows: int,
    tile: GemmTile,
    gathered: bool = False,
    pdl: bool = False,
) -> None:
    """Write one row of `out_SF` per position of `rows.sorted_slots`; positions in no block are left alone.

    Args:
        x_RH: [R, H], rows contiguous; or, `gathered`, [S, H] in the order of `rows.sorted_slots`, contiguous.
        w13: [E, 2F, H].
        out_SF: [S, F], contiguous, dtype of `x_RH`; rounded to once.
        bias: [E, 2F] or None.
        topk_weights_RK: [R, K] float32, to multiply the input with; None: not here.
        block_rows: what `rows` was cut with.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    if tile.specialized:
        # Gluon is not everywhere that Triton is.
        from vllm_moe_modular.kernels.specialized_gemm import specialized_gemm_gated

        specialized_gemm_gated(
            x_RH, w13, rows, out_SF=out_SF, top_k=top_k, activation=activation, bias=bias,
            topk_weights_RK=topk_weights_RK, block_rows=block_rows, tile=tile, gathered=gathered, pdl=pdl,
        )  # fmt: skip
        return
    E, two_f, H = w13.shape
    F = two_f // 2
    block_f = tile.block_columns
    by_descriptor = takes_descriptor(w13)
    x: torch.Tensor | TensorDescriptor = x_RH
    w: torch.Tensor | TensorDescriptor = w13
    if gathered:
        x = TensorDescriptor.from_tensor(x_RH, [block_rows, tile.block_depth])
    if by_descriptor and activation.interleaved:
        w = TensorDescriptor.from_tensor(w13.view(E * two_f, H), [2 * block_f, tile.block_depth])
    elif by_descriptor:
        w = TensorDescriptor.from_tensor(w13.view(E * 2, F, H), [2, block_f, tile.block_depth])
    grid = grid_of(rows, triton.cdiv(F, block_f), tile, x_RH.device)
    _grouped_gemm_gated_kernel[grid](
        out_SF, x, w, bias, topk_weights_RK, rows.sorted_slots, rows.blocks, rows.totals,
        activation.limit or 0.0, activation.alpha, activation.beta,
        x_RH.stride(0), H, F,
        K=top_k, ACTIVATION=activation.name, HAS_LIMIT=activation.limit is not None,
        INTERLEAVED=activation.interleaved, X_IS_DESCRIPTOR=gathered, W_IS_DESCRIPTOR=by_descriptor,
        EVEN_H=H % tile.block_depth == 0,
        BLOCK_R=block_rows, BLOCK_F=block_f, BLOCK_H=tile.block_depth, GROUP_R=tile.group_rows,
        NUM_STAGES=tile.num_stages, FLATTEN=tile.programs_per_sm > 0, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

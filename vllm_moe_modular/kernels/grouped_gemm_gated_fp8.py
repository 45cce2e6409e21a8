"""`grouped_gemm_gated` with fp8 rows and weights; the activated rows leave it as fp8 rows too.

    row = sorted_slots[p] // K, or p where there are none
    [gate | up][p, :] = x[row, :] @ w13[e].T (* weight[slot]) + w13_bias[e]      e = the expert of p's block
    y[p, f] = activation(gate[p, f], up[p, f]), quantised like `quantize_fp8`

A program has the 128 columns that share a scale, gate and up in an accumulator each, so that their scales are one
number per row and step, and the row's largest value is at hand when the activation is done. Weights are scaled per
block of 128 x 128 in the loop, or per output channel after it.

Shapes: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E experts, B blocks; G = H / 128 and
        J = F / 128, rounded up.
Cost:   S * 2F * H * 2 operations; bytes: every active expert's 2F * H once, S * H read, S * F written.
Reference: vllm_moe_modular.reference.grouped_gemm_gated over dequantised rows and weights, then `quantize_fp8`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.launch import grid_of, takes_descriptor, tile_in_group
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, Fp8Rows, quantized
from vllm_moe_modular.kernels.scaled_product import add_scaled_product, by_rows, scaled_accumulator, stands_second


@triton.jit
def _grouped_gemm_gated_fp8_kernel(
    y_ptr,  # [S, F] fp8
    y_scale_ptr,  # [S, J]
    x_ptr,  # [R, H] fp8, or the tensor descriptor of gathered rows [S, H]
    x_scale_ptr,  # [R, G], or of gathered rows [S, G], or [E, C, G]
    w_ptr,  # [E, 2F, H] fp8, or the tensor descriptor of [E * 2F, H]; interleaved of [E * F, 2H]
    w_scale_ptr,  # [E, 2J, G], or [E, 2F]
    bias_ptr,  # [E, 2F] or None
    topk_weights_ptr,  # [S] or None
    sorted_ptr,  # [S], or None: positions are rows
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    limit,
    alpha,
    beta,
    stride_x_scale_e,  # beyond that of its rows
    stride_x_scale_r,
    stride_x_scale_g,
    H,
    F,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    X_IS_DESCRIPTOR: tl.constexpr,
    W_IS_DESCRIPTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_blocks = tl.load(totals_ptr)
    steps, tiles_f = tl.cdiv(H, BLOCK), tl.cdiv(F, BLOCK)
    for tile in tl.range(tl.program_id(0), num_blocks * tiles_f, tl.num_programs(0), flatten=FLATTEN):
        b, tile_f = tile_in_group(tile, num_blocks, tiles_f, GROUP_R)
        e = tl.load(blocks_ptr + b * 4)
        start = tl.load(blocks_ptr + b * 4 + 1)
        rows = tl.load(blocks_ptr + b * 4 + 2)
        r = tl.arange(0, BLOCK_R)
        in_r = r < rows
        f0 = tile_f * BLOCK
        f = f0 + tl.arange(0, BLOCK)
        in_f = f < F
        h = tl.arange(0, BLOCK)
        gate_at, up_at = (2 * f, 2 * f + 1) if INTERLEAVED else (f, F + f)
        # int64 before any multiply: slots x hidden and experts x columns x hidden pass 2**31.
        first_column = e.to(tl.int64) * 2 * F
        if X_IS_DESCRIPTOR or sorted_ptr is None:
            row = (start + r).to(tl.int64)
        else:
            row = (tl.load(sorted_ptr + start + r, mask=in_r, other=0) // K).to(tl.int64)
        if not X_IS_DESCRIPTOR:
            x_ptrs = x_ptr + row[:, None] * H + h[None, :]
        if not W_IS_DESCRIPTOR:
            gate_ptrs = w_ptr + (first_column + gate_at)[:, None] * H + h[None, :]
            up_ptrs = w_ptr + (first_column + up_at)[:, None] * H + h[None, :]
        x_scale_ptrs = x_scale_ptr + e.to(tl.int64) * stride_x_scale_e + row * stride_x_scale_r
        if BLOCK_SCALED:
            gate_scale_ptr = w_scale_ptr + (e * 2 * tiles_f + tile_f).to(tl.int64) * steps
            up_scale_ptr = gate_scale_ptr + tiles_f * steps

        gate = scaled_accumulator(BLOCK_R, BLOCK, SECOND)
        up = scaled_accumulator(BLOCK_R, BLOCK, SECOND)
        for step in tl.range(0, steps, num_stages=NUM_STAGES):
            # The scales first: they arrive while the step waits for its operands.
            gate_scale = tl.load(x_scale_ptrs + step * stride_x_scale_g, mask=in_r, other=0.0)
            up_scale = gate_scale
            if BLOCK_SCALED:
                up_scale *= tl.load(up_scale_ptr + step)
                gate_scale *= tl.load(gate_scale_ptr + step)
            h0 = step * BLOCK
            in_h = h0 + h < H
            if X_IS_DESCRIPTOR:
                # Rows past the block's own are the next expert's, or were never written: they are not stored.
                x = x_ptr.load([start, h0])
            else:
                x = tl.load(x_ptrs + h0, mask=in_r[:, None] & in_h[None, :], other=0.0)
            if not W_IS_DESCRIPTOR:
                w_gate = tl.load(gate_ptrs + h0, mask=in_f[:, None] & in_h[None, :], other=0.0)
                w_up = tl.load(up_ptrs + h0, mask=in_f[:, None] & in_h[None, :], other=0.0)
            elif INTERLEAVED:
                # Where a gate's row ends its up begins: finite numbers, which meet zeros of x.
                w_gate = w_ptr.load([e * F + f0, h0])
                w_up = w_ptr.load([e * F + f0, H + h0])
            else:
                w_gate = w_ptr.load([e * 2 * F + f0, h0])
                w_up = w_ptr.load([e * 2 * F + F + f0, h0])
            gate = add_scaled_product(gate, x, w_gate, gate_scale, SECOND)
            up = add_scaled_product(up, x, w_up, up_scale, SECOND)

        gate_by_rows, up_by_rows = by_rows(gate, SECOND), by_rows(up, SECOND)
        if not BLOCK_SCALED:
            gate_by_rows *= tl.load(w_scale_ptr + first_column + gate_at, mask=in_f, other=0.0)[None, :]
            up_by_rows *= tl.load(w_scale_ptr + first_column + up_at, mask=in_f, other=0.0)[None, :]
        if topk_weights_ptr is not None:
            slot = tl.load(sorted_ptr + start + r, mask=in_r, other=0)
            weight = tl.load(topk_weights_ptr + slot, mask=in_r, other=0.0)[:, None]
            gate_by_rows *= weight
            up_by_rows *= weight
        if bias_ptr is not None:
            gate_by_rows += tl.load(bias_ptr + first_column + gate_at, mask=in_f, other=0.0).to(tl.float32)[None, :]
            up_by_rows += tl.load(bias_ptr + first_column + up_at, mask=in_f, other=0.0).to(tl.float32)[None, :]
        y = gated_activation(gate_by_rows, up_by_rows, limit, alpha, beta, ACTIVATION, HAS_LIMIT)
        values, scales = quantized(tl.where(in_f[None, :], y, 0.0))
        position = (start + r).to(tl.int64)
        tl.store(y_ptr + position[:, None] * F + f[None, :], values, mask=in_r[:, None] & in_f[None, :])
        tl.store(y_scale_ptr + position * tiles_f + tile_f, scales, mask=in_r)


def grouped_gemm_gated_fp8(
    x: Fp8Rows,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    rows: AlignedRows,
    *,
    out: Fp8Rows,
    top_k: int,
    activation: GatedActivation,
    bias: torch.Tensor | None = None,
    topk_weights_RK: torch.Tensor | None = None,
    block_rows: int,
    tile: GemmTile,
    gathered: bool = False,
    pdl: bool = False,
) -> None:
    """Write one row of `out` per position of `rows.sorted_slots`; positions in no block are left alone.

    Args:
        x: [R, H]; or, `gathered`, [S, H] in the order of `rows.sorted_slots`; the scales may have any strides, and of
            the batched format three dimensions, [E, C, G] for rows [E * C, H].
        w13: [E, 2F, H] float8_e4m3fn, contiguous.
        w13_scale: [E, 2F/128, H/128 rounded up], where F is a multiple of 128 and gates and ups are packed; or [E, 2F].
        out: [S, F].
        bias: [E, 2F] or None.
        topk_weights_RK: [R, K] float32, to multiply the input with; None: not here.
        block_rows: what `rows` was cut with.
        tile: 128 columns wide and deep.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    E, two_f, H = w13.shape
    F = two_f // 2
    stride_e, stride_r, stride_g = (0, *x.scales.stride()) if x.scales.dim() == 2 else x.scales.stride()
    if x.scales.dim() == 3:  # rows are counted on from expert to expert
        stride_e -= x.scales.shape[1] * stride_r
    if tile.specialized:
        # Gluon is not everywhere that Triton is.
        from vllm_moe_modular.kernels.specialized_gemm_fp8 import specialized_gemm_gated_fp8

        specialized_gemm_gated_fp8(
            x, w13, w13_scale, rows, out=out, top_k=top_k, activation=activation, bias=bias,
            topk_weights_RK=topk_weights_RK, block_rows=block_rows, tile=tile, gathered=gathered,
            x_scale_strides=(stride_e, stride_r, stride_g), pdl=pdl,
        )  # fmt: skip
        return
    by_descriptor = takes_descriptor(w13)
    x_values: torch.Tensor | TensorDescriptor = x.values
    w: torch.Tensor | TensorDescriptor = w13
    if gathered:
        x_values = TensorDescriptor.from_tensor(x.values, [block_rows, GROUP])
    if by_descriptor and activation.interleaved:
        w = TensorDescriptor.from_tensor(w13.view(E * F, 2 * H), [GROUP, GROUP])
    elif by_descriptor:
        w = TensorDescriptor.from_tensor(w13.view(E * two_f, H), [GROUP, GROUP])
    grid = grid_of(rows, triton.cdiv(F, GROUP), tile, w13.device)
    _grouped_gemm_gated_fp8_kernel[grid](
        out.values, out.scales, x_values, x.scales, w, w13_scale, bias, topk_weights_RK,
        rows.sorted_slots, rows.blocks, rows.totals,
        activation.limit or 0.0, activation.alpha, activation.beta, stride_e, stride_r, stride_g, H, F,
        K=top_k, ACTIVATION=activation.name, HAS_LIMIT=activation.limit is not None,
        INTERLEAVED=activation.interleaved, BLOCK_SCALED=w13_scale.dim() == 3, X_IS_DESCRIPTOR=gathered,
        W_IS_DESCRIPTOR=by_descriptor, BLOCK_R=block_rows, BLOCK=GROUP, GROUP_R=tile.group_rows,
        NUM_STAGES=tile.num_stages, FLATTEN=tile.programs_per_sm > 0, SECOND=stands_second(block_rows), PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

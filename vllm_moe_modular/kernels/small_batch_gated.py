"""First GEMM, bias and gated activation of one or a few rows: one matrix-vector product per slot, nothing sorted.

    [gate | up][s, :] = x[s // K, :] @ w13[ids[s]].T (* weight[s]) + w13_bias[ids[s]]
    y[s, f] = activation(gate[s, f], up[s, f])

Weights in fp8 are scaled on their way into the sum, per block of 128 x 128, or after it, per output channel; rows in
fp8 on their way into the sum. Nothing is quantised.

A slot whose id is below 0 or past the last expert is left alone. Weights are multiplied in float32: a matrix unit would
be given 15 empty rows of 16. Rows that share an expert read it twice, the second time from L2.

Shapes: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E experts;
        G = H / 128 and J = F / 128, rounded up.
Cost:   memory bound: S * 2F * H weights.
Reference: vllm_moe_modular.reference.small_batch_gated.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.gated_activation import GatedActivation, gated_activation


@dataclass(frozen=True, slots=True)
class Tile:
    block_f: int  # columns after the activation per program
    block_h: int  # elements of the summed dimension per step
    num_warps: int
    num_stages: int


def choose_tile(*, hidden: int, itemsize: int = 2) -> Tile:
    """Pure and CPU-testable. Narrow, so that every multiprocessor streams several tiles at a time,
    each with two steps in flight. fp8: twice as deep, and at least the depth of a scale."""
    widest, least = (1024, 128) if itemsize == 1 else (512, 16)
    block_h = min(widest, max(least, triton.next_power_of_2(hidden)))
    return Tile(block_f=4, block_h=block_h, num_warps=4, num_stages=3)


@triton.jit
def _each_128_times(scales, BLOCK_H: tl.constexpr):
    """[BLOCK_H / 128] to [BLOCK_H]."""
    return tl.broadcast_to(scales[:, None], [BLOCK_H // 128, 128]).reshape(BLOCK_H)


@triton.jit
def _small_batch_gated_kernel(
    y_ptr,  # [S, F]
    x_ptr,  # [R, H]
    x_scale_ptr,  # [R, G] or None
    w_ptr,  # [E, 2F, H]
    w_scale_ptr,  # [E, 2J, G], [E, 2F] or None
    bias_ptr,  # [E, 2F] or None
    ids_ptr,  # [S] int32 or int64
    topk_weights_ptr,  # [S] or None
    limit,
    alpha,
    beta,
    stride_x_r,
    stride_x_scale_r,
    stride_x_scale_g,
    H,
    F,
    E,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALE_RANK: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_f = tl.cdiv(F, BLOCK_F)
    s = tl.program_id(0) // tiles_f
    f0 = tl.program_id(0) % tiles_f * BLOCK_F
    f = f0 + tl.arange(0, BLOCK_F)
    in_f = f < F
    e = tl.load(ids_ptr + s).to(tl.int64)
    if (e >= 0) & (e < E):
        h = tl.arange(0, BLOCK_H)
        x_ptrs = x_ptr + (s // K).to(tl.int64) * stride_x_r + h
        gate_at, up_at = (2 * f, 2 * f + 1) if INTERLEAVED else (f, F + f)
        # int64 before the multiply: experts x intermediate x hidden passes 2**31.
        gate_ptrs = w_ptr + (e * 2 * F + gate_at)[:, None] * H + h[None, :]
        up_ptrs = w_ptr + (e * 2 * F + up_at)[:, None] * H + h[None, :]
        if SCALE_RANK == 3 or x_scale_ptr is not None:
            g = tl.arange(0, BLOCK_H // 128)
        if x_scale_ptr is not None:
            x_scale_ptrs = x_scale_ptr + (s // K).to(tl.int64) * stride_x_scale_r + g * stride_x_scale_g
        if SCALE_RANK == 3:
            # BLOCK_F divides 128: one scale for all columns of the program.
            gate_scale_ptrs = w_scale_ptr + (e * 2 * (F // 128) + f0 // 128) * tl.cdiv(H, 128) + g
            up_scale_ptrs = gate_scale_ptrs + F // 128 * tl.cdiv(H, 128)
        gates = tl.zeros([BLOCK_F, BLOCK_H], dtype=tl.float32)
        ups = tl.zeros([BLOCK_F, BLOCK_H], dtype=tl.float32)
        for h0 in tl.range(0, H, BLOCK_H, num_stages=NUM_STAGES):
            in_w = in_f[:, None] if EVEN_H else in_f[:, None] & (h0 + h < H)[None, :]
            x = tl.load(x_ptrs + h0, mask=h0 + h < H, other=0.0).to(tl.float32)
            if x_scale_ptr is not None:
                x_scales = tl.load(x_scale_ptrs + h0 // 128 * stride_x_scale_g, mask=h0 + g * 128 < H, other=0.0)
                x *= _each_128_times(x_scales, BLOCK_H)
            x_gate, x_up = x, x
            if SCALE_RANK == 3:
                in_g = h0 + g * 128 < H
                x_gate *= _each_128_times(tl.load(gate_scale_ptrs + h0 // 128, mask=in_g, other=0.0), BLOCK_H)
                x_up *= _each_128_times(tl.load(up_scale_ptrs + h0 // 128, mask=in_g, other=0.0), BLOCK_H)
            gates += x_gate[None, :] * tl.load(gate_ptrs + h0, mask=in_w, other=0.0).to(tl.float32)
            ups += x_up[None, :] * tl.load(up_ptrs + h0, mask=in_w, other=0.0).to(tl.float32)
        gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
        if SCALE_RANK == 2:
            gate *= tl.load(w_scale_ptr + e * 2 * F + gate_at, mask=in_f, other=0.0)
            up *= tl.load(w_scale_ptr + e * 2 * F + up_at, mask=in_f, other=0.0)
        if topk_weights_ptr is not None:
            weight = tl.load(topk_weights_ptr + s)
            gate *= weight
            up *= weight
        if bias_ptr is not None:
            gate += tl.load(bias_ptr + e * 2 * F + gate_at, mask=in_f, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + e * 2 * F + up_at, mask=in_f, other=0.0).to(tl.float32)
        EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
        y = gated_activation(gate, up, limit, alpha, beta, ACTIVATION, HAS_LIMIT, EXACT)
        tl.store(y_ptr + s.to(tl.int64) * F + f, y.to(y_ptr.dtype.element_ty), mask=in_f)


def small_batch_gated(
    x_RH: torch.Tensor,
    w13: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    *,
    out_SF: torch.Tensor,
    activation: GatedActivation,
    x_scale_RG: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    topk_weights_RK: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """Write row s of `out_SF` for each slot s that has an expert here; other rows are left alone.

    Args:
        x_RH: [R, H], rows contiguous; of a float dtype, or float8_e4m3fn with `x_scale_RG`, where the weights are too.
        w13: [E, 2F, H], contiguous; of the dtype of `x_RH`, or float8_e4m3fn with a `scale`.
        topk_ids_RK: [R, K], contiguous.
        out_SF: [S, F], contiguous, dtype of the activations; rounded to once.
        x_scale_RG: [R, H/128] float32, any strides; None: unquantised.
        scale: [E, 2F/128, H/128 rounded up] float32, where F is a multiple of 128 and gates and ups are packed; or
            [E, 2F]; None: unquantised.
        bias: [E, 2F] or None.
        topk_weights_RK: [R, K] float32, to multiply the input with; None: not here.
        pdl: let the next kernel be launched early; it has to wait for this one itself.
    """
    E, two_f, H = w13.shape
    F = two_f // 2
    tile = tile or choose_tile(hidden=H, itemsize=w13.element_size())
    grid = (topk_ids_RK.numel() * triton.cdiv(F, tile.block_f),)
    _small_batch_gated_kernel[grid](
        out_SF, x_RH, x_scale_RG, w13, scale, bias, topk_ids_RK, topk_weights_RK,
        activation.limit or 0.0, activation.alpha, activation.beta,
        x_RH.stride(0), *((0, 0) if x_scale_RG is None else x_scale_RG.stride()), H, F, E,
        K=topk_ids_RK.shape[1], ACTIVATION=activation.name, HAS_LIMIT=activation.limit is not None,
        INTERLEAVED=activation.interleaved, SCALE_RANK=0 if scale is None else scale.dim(),
        EVEN_H=H % tile.block_h == 0, BLOCK_F=tile.block_f,
        BLOCK_H=tile.block_h, NUM_STAGES=tile.num_stages, PDL=pdl, num_warps=tile.num_warps,
    )  # fmt: skip

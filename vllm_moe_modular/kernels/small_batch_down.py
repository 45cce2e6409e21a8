"""Second GEMM, bias, weights and sum over top-k of one or a few rows in one kernel.

    out[r, :] = sum over k with 0 <= ids[r, k] < E of
        weights[r, k] * (x[r, k, :] @ w2[ids[r, k]].T + w2_bias[ids[r, k]])

Weights in fp8 are scaled on their way into the sum, per block of 128 x 128, or after it, per output channel; the rows
stay as they are.

A program owns some columns of one row and runs through all of the row's experts, so the sum needs neither another
launch nor atomics, and its order is fixed. What lies behind an id that is not here is never read.

Shapes: R rows, K top-k, H hidden, F expert intermediate, E experts; G = H / 128 and J = F / 128, rounded up.
Cost:   memory bound: R * K * H * F weights.
Reference: vllm_moe_modular.reference.small_batch_down.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    block_h: int  # columns per program
    block_f: int  # elements of the summed dimension per step and expert
    num_warps: int
    num_stages: int


def choose_tile(*, top_k: int, intermediate: int, itemsize: int = 2) -> Tile:
    """Pure and CPU-testable. At most 16 KiB of weights per step and program, two steps in flight. fp8: twice as deep,
    and at least the depth of a scale."""
    block_h = 8
    deeper, least = (2, 128) if itemsize == 1 else (1, 16)
    widest = max(64, 8192 // (triton.next_power_of_2(top_k) * block_h)) * deeper
    block_f = min(widest, 512 * deeper, max(least, triton.next_power_of_2(intermediate)))
    return Tile(block_h=block_h, block_f=block_f, num_warps=8 if block_f >= 512 or itemsize == 1 else 4, num_stages=3)


@triton.jit
def _small_batch_down_kernel(
    out_ptr,  # [R, H]
    x_ptr,  # [R, K, F]
    w_ptr,  # [E, H, F]
    w_scale_ptr,  # [E, G, J], [E, H] or None
    bias_ptr,  # [E, H] or None
    ids_ptr,  # [R, K] int32 or int64
    topk_weights_ptr,  # [R, K], or None
    H,
    F,
    E,
    K,
    SCALE_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_h = tl.cdiv(H, BLOCK_H)
    r = (tl.program_id(0) // tiles_h).to(tl.int64)
    h0 = tl.program_id(0) % tiles_h * BLOCK_H
    h = h0 + tl.arange(0, BLOCK_H)
    in_h = h < H
    k = tl.arange(0, BLOCK_K)
    f = tl.arange(0, BLOCK_F)
    # The ids are older than the kernel before, which itself did not start early: they may be read at once.
    e = tl.load(ids_ptr + r * K + k, mask=k < K, other=-1).to(tl.int64)
    here = (e >= 0) & (e < E)
    in_w = here[:, None, None] & in_h[None, :, None]
    # int64 before the multiply: experts x hidden x intermediate passes 2**31.
    w_ptrs = w_ptr + (e[:, None] * H + h[None, :])[:, :, None] * F + f[None, None, :]
    x_ptrs = x_ptr + ((r * K + k) * F)[:, None] + f[None, :]
    if SCALE_RANK == 3:
        # BLOCK_H divides 128: one scale per expert for all columns of the program.
        j = tl.arange(0, BLOCK_F // 128)
        scale_ptrs = w_scale_ptr + ((e * tl.cdiv(H, 128) + h0 // 128) * tl.cdiv(F, 128))[:, None] + j[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_K, BLOCK_H, BLOCK_F], dtype=tl.float32)
    for f0 in tl.range(0, F, BLOCK_F, num_stages=NUM_STAGES):
        in_f = f0 + f < F
        x = tl.load(x_ptrs + f0, mask=here[:, None] & in_f[None, :], other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + f0, mask=in_w if EVEN_F else in_w & in_f[None, None, :], other=0.0).to(tl.float32)
        if SCALE_RANK == 3:
            in_j = here[:, None] & (f0 + j * 128 < F)[None, :]
            scales = tl.load(scale_ptrs + f0 // 128, mask=in_j, other=0.0)
            x *= tl.broadcast_to(scales[:, :, None], [BLOCK_K, BLOCK_F // 128, 128]).reshape(BLOCK_K, BLOCK_F)
        acc += x[:, None, :] * w
    y = tl.sum(acc, 2)
    if SCALE_RANK == 2:
        y *= tl.load(w_scale_ptr + e[:, None] * H + h[None, :], mask=here[:, None] & in_h[None, :], other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e[:, None] * H + h[None, :], mask=here[:, None] & in_h[None, :], other=0.0)
        y += bias.to(tl.float32)
    if topk_weights_ptr is not None:
        y *= tl.load(topk_weights_ptr + r * K + k, mask=here, other=0.0)[:, None]
    tl.store(out_ptr + r * H + h, tl.sum(y, 0).to(out_ptr.dtype.element_ty), mask=in_h)


def small_batch_down(
    x_SF: torch.Tensor,
    w2: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor | None,
    *,
    out_RH: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """Accumulates in float32, rounds once to the dtype of `out_RH`, writes every element of it.

    Args:
        x_SF: [R * K, F], contiguous; rows of slots that are not here may be uninitialised.
        w2: [E, H, F], contiguous; of the dtype of `x_SF`, or float8_e4m3fn with a `scale`.
        topk_ids_RK: [R, K], contiguous.
        topk_weights_RK: [R, K] float32, contiguous; None: the sum is unweighted.
        out_RH: [R, H], contiguous.
        scale: [E, H/128, F/128] float32, rounded up; or [E, H]; None: unquantised.
        bias: [E, H] or None.
        pdl: start early and wait inside for the kernel before.
    """
    E, H, F = w2.shape
    R, K = topk_ids_RK.shape
    tile = tile or choose_tile(top_k=K, intermediate=F, itemsize=w2.element_size())
    grid = (R * triton.cdiv(H, tile.block_h),)
    _small_batch_down_kernel[grid](
        out_RH, x_SF, w2, scale, bias, topk_ids_RK, topk_weights_RK, H, F, E, K,
        SCALE_RANK=0 if scale is None else scale.dim(),
        BLOCK_K=triton.next_power_of_2(K), EVEN_F=F % tile.block_f == 0, BLOCK_H=tile.block_h, BLOCK_F=tile.block_f,
        NUM_STAGES=tile.num_stages, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

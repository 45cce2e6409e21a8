"""`grouped_gemm_down` with fp8 rows and weights: rows grouped by expert in, one row per (row, k) slot out.

    y[sorted_slots[p], :] = x[p, :] @ w2[e].T + w2_bias[e]      e = the expert of p's block

A program has 128 columns, or two times 128 in an accumulator each, so that the scales of one are one number per row and
step. Weights are scaled per block of 128 x 128 in the loop, or per output channel after it.

Shapes: S slots, H hidden, F expert intermediate, E experts, B blocks; G = H / 128 and J = F / 128, rounded up.
Cost:   S * H * F * 2 operations; bytes: every active expert's H * F once, S * F read, S * H * 2 written.
Reference: vllm_moe_modular.reference.grouped_gemm_down over dequantised rows and weights.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.launch import grid_of, takes_descriptor, tile_in_group
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, Fp8Rows
from vllm_moe_modular.kernels.scaled_product import add_scaled_product, by_rows, scaled_accumulator, stands_second


@triton.jit
def _store(acc, y_ptr, w_scale_ptr, bias_ptr, e, h, H, y_row, in_r, BLOCK_SCALED: tl.constexpr, SECOND: tl.constexpr):
    """Scale per channel, add the bias, round and store the columns `h` of the rows `y_row`."""
    y = by_rows(acc, SECOND)
    in_h = h < H
    column = e.to(tl.int64) * H + h
    if not BLOCK_SCALED:
        y *= tl.load(w_scale_ptr + column, mask=in_h, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=in_h, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + y_row[:, None] * H + h[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_r[:, None] & in_h[None, :])


@triton.jit
def _grouped_gemm_down_fp8_kernel(
    y_ptr,  # [S, H]
    x_ptr,  # [S, F] fp8, or its tensor descriptor
    x_scale_ptr,  # [S, J]
    w_ptr,  # [E, H, F] fp8, or the tensor descriptor of [E * H, F]
    w_scale_ptr,  # [E, G, J], or [E, H]
    bias_ptr,  # [E, H] or None
    sorted_ptr,  # [S], or None: positions are slots
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    H,
    F,
    BLOCK_SCALED: tl.constexpr,
    IS_DESCRIPTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    TWICE: tl.constexpr,
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
    steps, groups = tl.cdiv(F, BLOCK), tl.cdiv(H, BLOCK)
    WIDTH: tl.constexpr = 2 * BLOCK if TWICE else BLOCK
    tiles_h = tl.cdiv(H, WIDTH)
    for tile in tl.range(tl.program_id(0), num_blocks * tiles_h, tl.num_programs(0), flatten=FLATTEN):
        b, tile_h = tile_in_group(tile, num_blocks, tiles_h, GROUP_R)
        h0 = tile_h * WIDTH
        e = tl.load(blocks_ptr + b * 4)
        start = tl.load(blocks_ptr + b * 4 + 1)
        rows = tl.load(blocks_ptr + b * 4 + 2)
        r = tl.arange(0, BLOCK_R)
        in_r = r < rows
        h = h0 + tl.arange(0, BLOCK)
        f = tl.arange(0, BLOCK)
        # int64 before any multiply: slots x intermediate and experts x hidden x intermediate pass 2**31.
        row = (start + r).to(tl.int64)
        x_scale_ptrs = x_scale_ptr + row * steps
        if not IS_DESCRIPTOR:
            x_ptrs = x_ptr + row[:, None] * F + f[None, :]
            w_ptrs = w_ptr + (e.to(tl.int64) * H + h)[:, None] * F + f[None, :]
        if BLOCK_SCALED:
            group = h0 // BLOCK
            w_scale_ptrs = w_scale_ptr + (e * groups + group).to(tl.int64) * steps

        y = scaled_accumulator(BLOCK_R, BLOCK, SECOND)
        if TWICE:
            y_right = scaled_accumulator(BLOCK_R, BLOCK, SECOND)
        for step in tl.range(0, steps, num_stages=NUM_STAGES):
            # The scales first: they arrive while the step waits for its operands.
            x_scale = tl.load(x_scale_ptrs + step, mask=in_r, other=0.0)
            scale, scale_right = x_scale, x_scale
            if BLOCK_SCALED:
                scale *= tl.load(w_scale_ptrs + step)
                if TWICE:
                    scale_right *= tl.load(w_scale_ptrs + steps + step, mask=group + 1 < groups, other=0.0)
            f0 = step * BLOCK
            in_f = f0 + f < F
            if IS_DESCRIPTOR:
                # Rows past the block's own are the next expert's, or were never written: they are not stored.
                x = x_ptr.load([start, f0])
                w = w_ptr.load([e * H + h0, f0])
            else:
                x = tl.load(x_ptrs + f0, mask=in_r[:, None] & in_f[None, :], other=0.0)
                w = tl.load(w_ptrs + f0, mask=(h < H)[:, None] & in_f[None, :], other=0.0)
            y = add_scaled_product(y, x, w, scale, SECOND)
            if TWICE:
                if IS_DESCRIPTOR:
                    w_right = w_ptr.load([e * H + h0 + BLOCK, f0])
                else:
                    in_right = (h + BLOCK < H)[:, None] & in_f[None, :]
                    w_right = tl.load(w_ptrs + BLOCK * F + f0, mask=in_right, other=0.0)
                y_right = add_scaled_product(y_right, x, w_right, scale_right, SECOND)

        if sorted_ptr is None:  # noqa: SIM108 - only one side may be compiled
            y_row = row
        else:
            y_row = tl.load(sorted_ptr + start + r, mask=in_r, other=0).to(tl.int64)
        _store(y, y_ptr, w_scale_ptr, bias_ptr, e, h, H, y_row, in_r, BLOCK_SCALED, SECOND)
        if TWICE:
            _store(y_right, y_ptr, w_scale_ptr, bias_ptr, e, h + BLOCK, H, y_row, in_r, BLOCK_SCALED, SECOND)


def grouped_gemm_down_fp8(
    x: Fp8Rows,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    rows: AlignedRows,
    *,
    out_SH: torch.Tensor,
    bias: torch.Tensor | None = None,
    block_rows: int,
    tile: GemmTile,
    pdl: bool = False,
) -> None:
    """Write row s of `out_SH` for each slot s in a block; other slots' rows are left alone.

    Args:
        x: [S, F], in the order of `rows.sorted_slots`.
        w2: [E, H, F] float8_e4m3fn, contiguous.
        w2_scale: [E, H/128, F/128 rounded up], or [E, H].
        out_SH: [S, H], contiguous, in the order of the slots; rounded to once.
        bias: [E, H] or None.
        block_rows: what `rows` was cut with.
        tile: 128 or 256 columns wide, 128 deep.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    if tile.specialized:
        # Gluon is not everywhere that Triton is.
        from vllm_moe_modular.kernels.specialized_gemm_fp8 import specialized_gemm_down_fp8

        specialized_gemm_down_fp8(
            x, w2, w2_scale, rows, out_SH=out_SH, bias=bias, block_rows=block_rows, tile=tile, pdl=pdl,
        )  # fmt: skip
        return
    E, H, F = w2.shape
    x_values: torch.Tensor | TensorDescriptor = x.values
    w: torch.Tensor | TensorDescriptor = w2
    by_descriptor = takes_descriptor(w2) and takes_descriptor(x.values)
    if by_descriptor:
        x_values = TensorDescriptor.from_tensor(x.values, [block_rows, GROUP])
        w = TensorDescriptor.from_tensor(w2.view(E * H, F), [GROUP, GROUP])
    grid = grid_of(rows, triton.cdiv(H, tile.block_columns), tile, w2.device)
    _grouped_gemm_down_fp8_kernel[grid](
        out_SH, x_values, x.scales, w, w2_scale, bias, rows.sorted_slots, rows.blocks, rows.totals, H, F,
        BLOCK_SCALED=w2_scale.dim() == 3, IS_DESCRIPTOR=by_descriptor, BLOCK_R=block_rows, BLOCK=GROUP,
        TWICE=tile.block_columns > GROUP, GROUP_R=tile.group_rows, NUM_STAGES=tile.num_stages,
        FLATTEN=tile.programs_per_sm > 0, SECOND=stands_second(block_rows), PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

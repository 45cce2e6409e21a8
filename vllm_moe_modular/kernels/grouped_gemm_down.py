"""Second grouped GEMM: rows grouped by expert in, one row per (row, k) slot out.

    y[sorted_slots[p], :] = x[p, :] @ w2[e].T + w2_bias[e]      e = the expert of p's block

Shapes: S slots, H hidden, F expert intermediate, E experts, B blocks.
Cost:   S * H * F * 2 operations; bytes: every active expert's H * F weights once, S * F read, S * H written.
Reference: vllm_moe_modular.reference.grouped_gemm_down.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.launch import grid_of, takes_descriptor, tile_in_group


@triton.jit
def _grouped_gemm_down_kernel(
    y_ptr,  # [S, H]
    x_ptr,  # [S, F], or its tensor descriptor
    w_ptr,  # [E, H, F], or the tensor descriptor of [E * H, F]
    bias_ptr,  # [E, H] or None
    sorted_ptr,  # [S], or None: positions are slots
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    H,
    F,
    IS_DESCRIPTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
    GROUP_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_blocks = tl.load(totals_ptr)
    tiles_h = tl.cdiv(H, BLOCK_H)
    for tile in tl.range(tl.program_id(0), num_blocks * tiles_h, tl.num_programs(0), flatten=FLATTEN):
        b, tile_h = tile_in_group(tile, num_blocks, tiles_h, GROUP_R)
        h0 = tile_h * BLOCK_H
        e = tl.load(blocks_ptr + b * 4)
        start = tl.load(blocks_ptr + b * 4 + 1)
        rows = tl.load(blocks_ptr + b * 4 + 2)
        r = tl.arange(0, BLOCK_R)
        in_r = r < rows
        h = h0 + tl.arange(0, BLOCK_H)
        in_h = h < H
        f = tl.arange(0, BLOCK_F)
        if not IS_DESCRIPTOR:
            # int64 before the multiply: slots x intermediate passes 2**31.
            x_ptrs = x_ptr + (start + r).to(tl.int64)[:, None] * F + f[None, :]
            w_ptrs = w_ptr + (e.to(tl.int64) * H + h)[:, None] * F + f[None, :]

        acc = tl.zeros([BLOCK_R, BLOCK_H], dtype=tl.float32)
        for f0 in tl.range(0, F, BLOCK_F, num_stages=NUM_STAGES):
            if IS_DESCRIPTOR:
                # Rows past the block's own are the next expert's, or were never written: they are not stored.
                x = x_ptr.load([start, f0])
                w = w_ptr.load([e * H + h0, f0])
            else:
                in_f = f0 + f < F
                x = tl.load(x_ptrs + f0, mask=in_r[:, None] & in_f[None, :], other=0.0)
                w = tl.load(w_ptrs + f0, mask=in_h[:, None] & in_f[None, :], other=0.0)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")

        if bias_ptr is not None:
            bias = tl.load(bias_ptr + e.to(tl.int64) * H + h, mask=in_h, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if sorted_ptr is None:
            slot = (start + r).to(tl.int64)
        else:
            slot = tl.load(sorted_ptr + start + r, mask=in_r, other=0).to(tl.int64)
        y_ptrs = y_ptr + slot[:, None] * H + h[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=in_r[:, None] & in_h[None, :])


def grouped_gemm_down(
    x_SF: torch.Tensor,
    w2: torch.Tensor,
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
        x_SF: [S, F], contiguous, in the order of `rows.sorted_slots`.
        w2: [E, H, F].
        out_SH: [S, H], contiguous, in the order of the slots; rounded to once.
        bias: [E, H] or None.
        block_rows: what `rows` was cut with.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    if tile.specialized:
        # Gluon is not everywhere that Triton is.
        from vllm_moe_modular.kernels.specialized_gemm import specialized_gemm_down

        specialized_gemm_down(x_SF, w2, rows, out_SH=out_SH, bias=bias, block_rows=block_rows, tile=tile, pdl=pdl)
        return
    E, H, F = w2.shape
    x: torch.Tensor | TensorDescriptor = x_SF
    w: torch.Tensor | TensorDescriptor = w2
    by_descriptor = takes_descriptor(w2) and takes_descriptor(x_SF)
    if by_descriptor:
        x = TensorDescriptor.from_tensor(x_SF, [block_rows, tile.block_depth])
        w = TensorDescriptor.from_tensor(w2.view(E * H, F), [tile.block_columns, tile.block_depth])
    grid = grid_of(rows, triton.cdiv(H, tile.block_columns), tile, x_SF.device)
    _grouped_gemm_down_kernel[grid](
        out_SH, x, w, bias, rows.sorted_slots, rows.blocks, rows.totals, H, F,
        IS_DESCRIPTOR=by_descriptor, BLOCK_R=block_rows, BLOCK_H=tile.block_columns, BLOCK_F=tile.block_depth,
        GROUP_R=tile.group_rows, NUM_STAGES=tile.num_stages, FLATTEN=tile.programs_per_sm > 0, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

"""`specialized_gemm` with fp8 rows and weights: `grouped_gemm_gated_fp8` and `grouped_gemm_down_fp8` for many rows on
Hopper, to the bit.

A step's products are added in float32 with their scales, as in `scaled_product`: first those of the left accumulator,
then, when they are added, those of the right one, because a third and a fourth accumulator would not find registers.
Meanwhile the other warpgroup has the matrix unit. Scales are read a step ahead.

Shapes: S slots, DEPTH and WIDTH as in `specialized_gemm`: multiples of 128, and H of 256.
Cost:   that of the kernels that it stands for.
Reference: those of `grouped_gemm_gated_fp8` and `grouped_gemm_down_fp8`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.kernels.gemm_tiles import GemmTile
from vllm_moe_modular.kernels.launch import grid_of
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantized
from vllm_moe_modular.kernels.specialized_warps import (
    COLUMNS,
    GROUP_ROWS,
    activate,
    add_bias,
    begin_dependent,
    block_of,
    copyable_rows,
    descriptor,
    load_tiles,
    pass_by,
    registers,
    shared_memory,
    store_columns,
    weight_of_rows,
)

_COLUMNS = gl.constexpr(COLUMNS)
_GROUP_ROWS = gl.constexpr(GROUP_ROWS)

_quantize = gluon.jit(quantized.fn)


@gluon.jit
def _scales_of_channels(w_scale_ptr, first, layout: gl.constexpr):
    """[1, 128]."""
    return gl.load(w_scale_ptr + first + gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def _multiply_tiles_fp8(
    y_ptr,
    y_scale_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    topk_weights_ptr,
    sorted_ptr,
    blocks_ptr,
    totals_ptr,
    limit,
    alpha,
    beta,
    stride_x_scale_e,
    stride_x_scale_r,
    stride_x_scale_g,
    x_smem,
    w_smem,
    full,
    empty,
    DEPTH,
    WIDTH,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    BLOCK_SCALED: gl.constexpr,
    GATHER: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_R: gl.constexpr,
):
    """A warpgroup's part: rows 64 * GROUP and on of each block."""
    GROUPS: gl.constexpr = BLOCK_R // _GROUP_ROWS
    WIDE: gl.constexpr = _COLUMNS if GATED else 2 * _COLUMNS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    num_blocks = gl.load(totals_ptr)
    tiles_across = gl.cdiv(WIDTH, WIDE)
    steps = DEPTH // 128
    nothing = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, mma)
    n = 0
    for tile in range(gl.program_id(0), num_blocks * tiles_across, gl.num_programs(0)):
        e, start, rows, across = block_of(blocks_ptr, num_blocks, tiles_across, tile, GROUP_R)
        if rows <= GROUP * _GROUP_ROWS:
            n = pass_by(full, empty, n, steps, STAGES)
        else:
            r = GROUP * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, mma))
            position = start + gl.minimum(r, rows - 1)
            row = gl.load(sorted_ptr + position) // K if GATHER else position
            # int64 before any multiply: slots x hidden and experts x hidden x intermediate pass 2**31.
            x_scale_ptrs = x_scale_ptr + e.to(gl.int64) * stride_x_scale_e + row.to(gl.int64) * stride_x_scale_r
            x_scale = gl.load(x_scale_ptrs)
            if BLOCK_SCALED:
                left_group = e * 2 * tiles_across + across if GATED else e * (WIDTH // _COLUMNS) + 2 * across
                left_scale_ptr = w_scale_ptr + left_group.to(gl.int64) * steps
                right_scale_ptr = left_scale_ptr + (tiles_across if GATED else 1) * steps
                left_scale = gl.load(left_scale_ptr)
                right_scale = gl.load(right_scale_ptr)
            left = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, mma)
            right = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, mma)
            for step in range(steps):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), n // STAGES & 1)
                if GATHER:
                    fence_async_shared()
                x = x_smem.index(GROUPS * stage + GROUP)
                w = w_smem.index(2 * stage).permute((1, 0))
                product = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
                left_factor, right_factor = x_scale, x_scale
                ahead = gl.minimum(step + 1, steps - 1)
                x_scale = gl.load(x_scale_ptrs + ahead * stride_x_scale_g)
                if BLOCK_SCALED:
                    left_factor *= left_scale
                    right_factor *= right_scale
                    left_scale = gl.load(left_scale_ptr + ahead)
                    right_scale = gl.load(right_scale_ptr + ahead)
                product = warpgroup_mma_wait(0, [product])
                left += product * left_factor[:, None]
                # Nothing is waited for: it keeps the compiler from adding while the next products fill other registers.
                left = warpgroup_mma_wait(0, [left])
                w = w_smem.index(2 * stage + 1).permute((1, 0))
                product = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, [product])
                mbarrier.arrive(empty.index(stage))
                right += product * right_factor[:, None]
                n += 1
            if not BLOCK_SCALED:
                first = e.to(gl.int64) * (2 * WIDTH if GATED else WIDTH) + across * WIDE
                left *= _scales_of_channels(w_scale_ptr, first, mma)
                right *= _scales_of_channels(w_scale_ptr, first + (WIDTH if GATED else _COLUMNS), mma)
            if topk_weights_ptr is not None:
                weight = weight_of_rows(topk_weights_ptr, sorted_ptr, start, rows, left, GROUP)
                left *= weight
                right *= weight
            if bias_ptr is not None:
                left, right = add_bias(left, right, bias_ptr, e, across, WIDTH, GATED)
            if GATED:
                y = activate(left, right, limit, alpha, beta, ACTIVATION, HAS_LIMIT)
                values, scales = _quantize(y)
                store_columns(y_ptr, values, None, start, rows, WIDTH, across * WIDE, GROUP)
                gl.store(y_scale_ptr + position.to(gl.int64) * tiles_across + across, scales, mask=r < rows)
            else:
                DTYPE: gl.constexpr = y_ptr.dtype.element_ty
                column = across * WIDE
                store_columns(y_ptr, left.to(DTYPE), sorted_ptr, start, rows, WIDTH, column, GROUP)
                store_columns(y_ptr, right.to(DTYPE), sorted_ptr, start, rows, WIDTH, column + _COLUMNS, GROUP)


@gluon.jit
def _specialized_gemm_fp8_kernel(
    y_ptr,  # [S, WIDTH] fp8, or in the dtype of the layer
    y_scale_ptr,  # [S, WIDTH / 128], or None
    x,  # [R, DEPTH] fp8, or the descriptor of rows in the order of the positions
    x_scale_ptr,  # [R, DEPTH / 128], or of gathered rows [S, DEPTH / 128], or [E, C, DEPTH / 128]
    w_desc,  # of [E * 2 * WIDTH, DEPTH] fp8, or [E * WIDTH, DEPTH]
    w_scale_ptr,  # [E, 2 * WIDTH / 128, DEPTH / 128], or [E, 2 * WIDTH]; without the 2
    bias_ptr,  # [E, 2 * WIDTH] or [E, WIDTH], or None
    topk_weights_ptr,  # [S] or None
    sorted_ptr,  # [S], or None: positions are slots
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    limit,
    alpha,
    beta,
    stride_x_scale_e,  # beyond that of its rows
    stride_x_scale_r,
    stride_x_scale_g,
    DEPTH,
    WIDTH,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    BLOCK_SCALED: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_R: gl.constexpr,
    PDL: gl.constexpr,
    MULTIPLIER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    if PDL:
        begin_dependent()
    x_smem, w_smem, full, empty = shared_memory(gl.float8e4nv, BLOCK_R, STAGES, GATHER)
    # A tuple with a name would lose its constants, so they are all written out.
    if BLOCK_R == _GROUP_ROWS:
        gl.warp_specialize([
            (_multiply_tiles_fp8, (
                y_ptr, y_scale_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, topk_weights_ptr, sorted_ptr,
                blocks_ptr, totals_ptr, limit, alpha, beta, stride_x_scale_e, stride_x_scale_r,
                stride_x_scale_g, x_smem, w_smem, full, empty, DEPTH, WIDTH, K, GATED, ACTIVATION, HAS_LIMIT,
                BLOCK_SCALED, GATHER, 0, BLOCK_R, STAGES, GROUP_R,
            )),
            (load_tiles, (
                x, DEPTH, w_desc, sorted_ptr, blocks_ptr, totals_ptr, x_smem, w_smem, full, empty, DEPTH, WIDTH, K,
                GATED, GATHER, BLOCK_R, STAGES, GROUP_R,
            )),
        ], [4], [LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_tiles_fp8, (
                y_ptr, y_scale_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, topk_weights_ptr, sorted_ptr,
                blocks_ptr, totals_ptr, limit, alpha, beta, stride_x_scale_e, stride_x_scale_r,
                stride_x_scale_g, x_smem, w_smem, full, empty, DEPTH, WIDTH, K, GATED, ACTIVATION, HAS_LIMIT,
                BLOCK_SCALED, GATHER, 0, BLOCK_R, STAGES, GROUP_R,
            )),
            (_multiply_tiles_fp8, (
                y_ptr, y_scale_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, topk_weights_ptr, sorted_ptr,
                blocks_ptr, totals_ptr, limit, alpha, beta, stride_x_scale_e, stride_x_scale_r,
                stride_x_scale_g, x_smem, w_smem, full, empty, DEPTH, WIDTH, K, GATED, ACTIVATION, HAS_LIMIT,
                BLOCK_SCALED, GATHER, 1, BLOCK_R, STAGES, GROUP_R,
            )),
            (load_tiles, (
                x, DEPTH, w_desc, sorted_ptr, blocks_ptr, totals_ptr, x_smem, w_smem, full, empty, DEPTH, WIDTH, K,
                GATED, GATHER, BLOCK_R, STAGES, GROUP_R,
            )),
        ], [4, 4], [MULTIPLIER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


def specialized_gemm_gated_fp8(
    x: Fp8Rows,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    rows: AlignedRows,
    *,
    out: Fp8Rows,
    top_k: int,
    activation: GatedActivation,
    bias: torch.Tensor | None,
    topk_weights_RK: torch.Tensor | None,
    block_rows: int,
    tile: GemmTile,
    gathered: bool,
    x_scale_strides: tuple[int, int, int],
    pdl: bool,
) -> None:
    """See `grouped_gemm_gated_fp8`.

    Args:
        x_scale_strides: of an expert beyond its rows', of a row and of a group.
    """
    E, two_f, H = w13.shape
    F = two_f // 2
    assert not activation.interleaved, "interleaved gates in a specialised GEMM"
    assert H % 128 == F % 128 == 0, f"{H} and {F} columns in a specialised fp8 GEMM"
    assert block_rows <= 2 * GROUP_ROWS, f"blocks of {block_rows} rows in a specialised fp8 GEMM"
    gathered = gathered or rows.sorted_slots is None
    values = copyable_rows(x.values)
    _specialized_gemm_fp8_kernel[grid_of(rows, F // COLUMNS, tile, w13.device)](
        out.values, out.scales, descriptor(values, GROUP_ROWS) if gathered else values, x.scales,
        descriptor(w13.view(E * two_f, H), COLUMNS), w13_scale, bias, topk_weights_RK,
        rows.sorted_slots, rows.blocks, rows.totals, activation.limit or 0.0, activation.alpha, activation.beta,
        *x_scale_strides, H, F,
        K=top_k, GATED=True, ACTIVATION=activation.name, HAS_LIMIT=activation.limit is not None,
        BLOCK_SCALED=w13_scale.dim() == 3, GATHER=not gathered, BLOCK_R=block_rows, STAGES=tile.num_stages,
        GROUP_R=tile.group_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
        **registers(block_rows),
    )  # fmt: skip


def specialized_gemm_down_fp8(
    x: Fp8Rows,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    rows: AlignedRows,
    *,
    out_SH: torch.Tensor,
    bias: torch.Tensor | None,
    block_rows: int,
    tile: GemmTile,
    pdl: bool,
) -> None:
    """See `grouped_gemm_down_fp8`."""
    E, H, F = w2.shape
    assert H % 256 == F % 128 == 0, f"{H} and {F} columns in a specialised fp8 GEMM"
    assert block_rows <= 2 * GROUP_ROWS, f"blocks of {block_rows} rows in a specialised fp8 GEMM"
    _specialized_gemm_fp8_kernel[grid_of(rows, H // (2 * COLUMNS), tile, w2.device)](
        out_SH, None, descriptor(x.values, GROUP_ROWS), x.scales, descriptor(w2.view(E * H, F), COLUMNS), w2_scale,
        bias, None, rows.sorted_slots, rows.blocks, rows.totals, 0.0, 0.0, 0.0, 0, x.scales.stride(0), 1, F, H,
        K=1, GATED=False, ACTIVATION="silu", HAS_LIMIT=False, BLOCK_SCALED=w2_scale.dim() == 3, GATHER=False,
        BLOCK_R=block_rows, STAGES=tile.num_stages, GROUP_R=tile.group_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
        **registers(block_rows),
    )  # fmt: skip

"""Both grouped GEMMs for many rows on Hopper, in Gluon: some warps of a program only load, the others only multiply.

To the bit what `grouped_gemm_gated` and `grouped_gemm_down` give, which launch it where their tile says so. How the
warps work together is in `specialized_warps`.

Shapes: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E experts, B blocks; DEPTH is H for the gated
        GEMM and F for the other, WIDTH the other way round.
Cost:   that of the kernels that it stands for.
Reference: vllm_moe_modular.reference.grouped_gemm_gated, vllm_moe_modular.reference.grouped_gemm_down.
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


@gluon.jit
def _multiply_tiles(
    y_ptr,
    bias_ptr,
    topk_weights_ptr,
    sorted_ptr,
    blocks_ptr,
    totals_ptr,
    limit,
    alpha,
    beta,
    x_smem,
    w_smem,
    full,
    empty,
    DEPTH,
    WIDTH,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    GATHER: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_R: gl.constexpr,
):
    """A warpgroup's part: rows 64 * GROUP and on of each block."""
    GROUPS: gl.constexpr = BLOCK_R // _GROUP_ROWS
    WIDE: gl.constexpr = _COLUMNS if GATED else 2 * _COLUMNS
    # Three warpgroups have too few registers for an instruction that writes all 256 columns.
    wide_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    narrow_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    w_stages = w_smem._reinterpret(w_smem.dtype, [STAGES, 2 * _COLUMNS, 64], w_smem.type.layout)
    num_blocks = gl.load(totals_ptr)
    tiles_across = gl.cdiv(WIDTH, WIDE)
    steps = gl.cdiv(DEPTH, 64)
    n = 0
    for tile in range(gl.program_id(0), num_blocks * tiles_across, gl.num_programs(0)):
        e, start, rows, across = block_of(blocks_ptr, num_blocks, tiles_across, tile, GROUP_R)
        if rows <= GROUP * _GROUP_ROWS:
            n = pass_by(full, empty, n, steps, STAGES)
        else:
            if GROUPS < 3:
                acc = gl.zeros([_GROUP_ROWS, 2 * _COLUMNS], gl.float32, wide_mma)
            else:
                left = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, narrow_mma)
                right = gl.zeros([_GROUP_ROWS, _COLUMNS], gl.float32, narrow_mma)
            for step in range(steps):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), n // STAGES & 1)
                if GATHER:
                    fence_async_shared()
                x = x_smem.index(GROUPS * stage + GROUP)
                # One step of products stays in flight: those of the step before are done, and its stage is free.
                if GROUPS < 3:
                    w = w_stages.index(stage).permute((1, 0))
                    acc = warpgroup_mma(x, w, acc, use_acc=step > 0, is_async=True)
                    acc = warpgroup_mma_wait(1, [acc])
                else:
                    w = w_smem.index(2 * stage).permute((1, 0))
                    left = warpgroup_mma(x, w, left, use_acc=step > 0, is_async=True)
                    w = w_smem.index(2 * stage + 1).permute((1, 0))
                    right = warpgroup_mma(x, w, right, use_acc=step > 0, is_async=True)
                    left, right = warpgroup_mma_wait(2, [left, right])
                mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=step > 0)
                n += 1
            if GROUPS < 3:
                acc = warpgroup_mma_wait(0, [acc])
                left, right = acc.reshape(_GROUP_ROWS, 2, _COLUMNS).permute(0, 2, 1).split()
            else:
                left, right = warpgroup_mma_wait(0, [left, right])
            mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
            if topk_weights_ptr is not None:
                weight = weight_of_rows(topk_weights_ptr, sorted_ptr, start, rows, left, GROUP)
                left *= weight
                right *= weight
            if bias_ptr is not None:
                left, right = add_bias(left, right, bias_ptr, e, across, WIDTH, GATED)
            DTYPE: gl.constexpr = y_ptr.dtype.element_ty
            if GATED:
                y = activate(left, right, limit, alpha, beta, ACTIVATION, HAS_LIMIT)
                store_columns(y_ptr, y.to(DTYPE), None, start, rows, WIDTH, across * WIDE, GROUP)
            else:
                column = across * WIDE
                store_columns(y_ptr, left.to(DTYPE), sorted_ptr, start, rows, WIDTH, column, GROUP)
                store_columns(y_ptr, right.to(DTYPE), sorted_ptr, start, rows, WIDTH, column + _COLUMNS, GROUP)


@gluon.jit
def _specialized_gemm_kernel(
    y_ptr,  # [S, WIDTH]
    x,  # [R, DEPTH], or the descriptor of rows in the order of the positions
    x_stride_r,
    w_desc,  # of [E * 2 * WIDTH, DEPTH], or [E * WIDTH, DEPTH]
    bias_ptr,  # [E, 2 * WIDTH] or [E, WIDTH], or None
    topk_weights_ptr,  # [S] or None
    sorted_ptr,  # [S], or None: positions are slots
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    limit,
    alpha,
    beta,
    DEPTH,
    WIDTH,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
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
    x_smem, w_smem, full, empty = shared_memory(y_ptr.dtype.element_ty, BLOCK_R, STAGES, GATHER)
    # A tuple with a name would lose its constants, so they are all written out.
    if BLOCK_R == _GROUP_ROWS:
        gl.warp_specialize([
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                0, BLOCK_R, STAGES, GROUP_R,
            )),
            (load_tiles, (
                x, x_stride_r, w_desc, sorted_ptr, blocks_ptr, totals_ptr, x_smem, w_smem, full, empty, DEPTH, WIDTH, K,
                GATED, GATHER, BLOCK_R, STAGES, GROUP_R,
            )),
        ], [4], [LOADER_REGISTERS])  # fmt: skip
    elif BLOCK_R == 2 * _GROUP_ROWS:
        gl.warp_specialize([
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                0, BLOCK_R, STAGES, GROUP_R,
            )),
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                1, BLOCK_R, STAGES, GROUP_R,
            )),
            (load_tiles, (
                x, x_stride_r, w_desc, sorted_ptr, blocks_ptr, totals_ptr, x_smem, w_smem, full, empty, DEPTH, WIDTH, K,
                GATED, GATHER, BLOCK_R, STAGES, GROUP_R,
            )),
        ], [4, 4], [MULTIPLIER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                0, BLOCK_R, STAGES, GROUP_R,
            )),
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                1, BLOCK_R, STAGES, GROUP_R,
            )),
            (_multiply_tiles, (
                y_ptr, bias_ptr, topk_weights_ptr, sorted_ptr, blocks_ptr, totals_ptr, limit, alpha, beta,
                x_smem, w_smem, full, empty, DEPTH, WIDTH, GATED, ACTIVATION, HAS_LIMIT, GATHER,
                2, BLOCK_R, STAGES, GROUP_R,
            )),
            (load_tiles, (
                x, x_stride_r, w_desc, sorted_ptr, blocks_ptr, totals_ptr, x_smem, w_smem, full, empty, DEPTH, WIDTH, K,
                GATED, GATHER, BLOCK_R, STAGES, GROUP_R,
            )),
        ], [4, 4, 4], [MULTIPLIER_REGISTERS, MULTIPLIER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


def specialized_gemm_gated(
    x_RH: torch.Tensor,
    w13: torch.Tensor,
    rows: AlignedRows,
    *,
    out_SF: torch.Tensor,
    top_k: int,
    activation: GatedActivation,
    bias: torch.Tensor | None,
    topk_weights_RK: torch.Tensor | None,
    block_rows: int,
    tile: GemmTile,
    gathered: bool,
    pdl: bool,
) -> None:
    """See `grouped_gemm_gated`; gates and ups are packed, and blocks of 192 rows want them gathered."""
    E, two_f, H = w13.shape
    F = two_f // 2
    assert not activation.interleaved, "interleaved gates in a specialised GEMM"
    assert H % 64 == 0, f"rows of {H} columns in a specialised GEMM"
    assert tile.num_stages >= 2, "one stage in a specialised GEMM, which frees it a step later"
    gathered = gathered or rows.sorted_slots is None
    assert gathered or block_rows <= 2 * GROUP_ROWS, f"blocks of {block_rows} rows that are not gathered"
    x_RH = copyable_rows(x_RH)
    _specialized_gemm_kernel[grid_of(rows, -(-F // COLUMNS), tile, w13.device)](
        out_SF, descriptor(x_RH, GROUP_ROWS) if gathered else x_RH, x_RH.stride(0),
        descriptor(w13.view(E * two_f, H), COLUMNS), bias, topk_weights_RK, rows.sorted_slots, rows.blocks, rows.totals,
        activation.limit or 0.0, activation.alpha, activation.beta, H, F,
        K=top_k, GATED=True, ACTIVATION=activation.name, HAS_LIMIT=activation.limit is not None,
        GATHER=not gathered, BLOCK_R=block_rows, STAGES=tile.num_stages,
        GROUP_R=tile.group_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
        **registers(block_rows),
    )  # fmt: skip


def specialized_gemm_down(
    x_SF: torch.Tensor,
    w2: torch.Tensor,
    rows: AlignedRows,
    *,
    out_SH: torch.Tensor,
    bias: torch.Tensor | None,
    block_rows: int,
    tile: GemmTile,
    pdl: bool,
) -> None:
    """See `grouped_gemm_down`."""
    E, H, F = w2.shape
    assert tile.num_stages >= 2, "one stage in a specialised GEMM, which frees it a step later"
    _specialized_gemm_kernel[grid_of(rows, -(-H // (2 * COLUMNS)), tile, w2.device)](
        out_SH, descriptor(x_SF, GROUP_ROWS), F, descriptor(w2.view(E * H, F), COLUMNS),
        bias, None, rows.sorted_slots, rows.blocks, rows.totals, 0.0, 0.0, 0.0, F, H,
        K=1, GATED=False, ACTIVATION="silu", HAS_LIMIT=False, GATHER=False, BLOCK_R=block_rows,
        STAGES=tile.num_stages, GROUP_R=tile.group_rows, PDL=pdl, num_warps=4, launch_pdl=pdl,
        **registers(block_rows),
    )  # fmt: skip

"""What the specialised GEMMs share, in Gluon: the warps that only load, what they load into, how results are stored.

A program of `specialized_gemm` or `specialized_gemm_fp8` takes blocks of 64, 128 or 192 rows; each 64 of them have a
warpgroup that multiplies, in its own time, and four more warps load for all of them.

    loader        for each step: wait empty[s]; full[s] expects the bytes; copy engine: rows and weights of the step
    warpgroups    for each step: wait full[s]; multiply; when the products are done, arrive at empty[s]

Stage s = n % STAGES of the n-th step that this program takes, over all its tiles, so that the loader is ahead by up to
STAGES steps and reads for the next tile while the last one is stored. What orders the two sides:

- The copy engine completes full[s] when its bytes have come, and so releases them to who waits for it. Rows that are
  gathered come by `cp.async` of the loader's 128 threads, each of which arrives at full[s] when its own have come; the
  matrix unit reads through the async proxy, hence the fence behind the wait.
- empty[s] counts one arrival of each warpgroup, behind the wait for the products that read the stage: no later copy
  overtakes them. The first time round nothing has to be waited for: a wait for the parity of the phase before the first
  returns at once.
- A warpgroup whose 64 rows do not exist, in the last block of an expert, waits and arrives all the same; nothing is
  copied or multiplied for it.

Shapes: as in `specialized_gemm`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_moe_modular.kernels.gated_activation import gated_activation
from vllm_moe_modular.kernels.launch import tile_in_group

GROUP_ROWS = 64
"""Rows of a warpgroup: the least that its matrix instruction takes."""

COLUMNS = 128
"""Of an accumulator. A program has two side by side: gates and ups, or the left and the right of 256 columns."""

STEP_BYTES = 128
"""Of a row per step: what the copy engine lays out for the matrix unit at a time."""

_COLUMNS = gl.constexpr(COLUMNS)
_GROUP_ROWS = gl.constexpr(GROUP_ROWS)

# The very functions of the other kernels, compiled by Gluon.
activate = gluon.jit(gated_activation.fn)
_tile_in_group = gluon.jit(tile_in_group.fn)


def registers(block_rows: int) -> dict[str, int]:
    """Of a thread that multiplies and of one that loads: those of all warpgroups are 65,536."""
    groups, rest = divmod(block_rows, GROUP_ROWS)
    assert rest == 0, f"blocks of {block_rows} rows"
    assert groups in (1, 2, 3), f"blocks of {block_rows} rows"
    multiplier, loader = (160, 32) if groups == 3 else (224, 56)
    return {"MULTIPLIER_REGISTERS": multiplier, "LOADER_REGISTERS": loader}


def copyable_rows(x: torch.Tensor) -> torch.Tensor:
    """[R, D] for copies by 16 bytes: itself, or a copy of rows that lie at odd places."""
    is_copyable = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0  # 16 elements is what the compiler is told of
    return x if is_copyable else x.clone(memory_format=torch.contiguous_format)


def descriptor(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of a contiguous [N, D], for copies of so many rows and one step."""
    box = [rows, STEP_BYTES // t.element_size()]
    layout = gl.NVMMASharedLayout(STEP_BYTES, 8 * t.element_size(), 2)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), box, layout)


@gluon.jit
def begin_dependent():
    """Let the next kernel be launched, and wait for the one before; for all warps, if it is done before they part."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def block_of(blocks_ptr, num_blocks, tiles_across, tile, GROUP_R: gl.constexpr):
    """Expert, first position and rows of a tile's block, and which of the tiles across it is."""
    b, across = _tile_in_group(tile, num_blocks, tiles_across, GROUP_R)
    e = gl.load(blocks_ptr + b * 4)
    start = gl.load(blocks_ptr + b * 4 + 1)
    rows = gl.load(blocks_ptr + b * 4 + 2)
    return e, start, rows, across


@gluon.jit
def shared_memory(DTYPE: gl.constexpr, BLOCK_R: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr):
    """Rows by stage and warpgroup, weights by stage and accumulator, and the barriers full and empty."""
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    DEPTH_STEP: gl.constexpr = 1024 // BITS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES * BLOCK_R // _GROUP_ROWS, _GROUP_ROWS, DEPTH_STEP], layout)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES * 2, _COLUMNS, DEPTH_STEP], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the weights, and one for each warpgroup's rows or one of each thread that gathers them.
        mbarrier.init(full.index(stage), count=1 + (128 if GATHER else BLOCK_R // _GROUP_ROWS))
        mbarrier.init(empty.index(stage), count=BLOCK_R // _GROUP_ROWS)
    fence_async_shared()
    return x_smem, w_smem, full, empty


@gluon.jit
def load_tiles(
    x,  # [R, DEPTH], or the descriptor of rows in the order of the positions
    x_stride_r,
    w_desc,  # of [E * 2 * WIDTH, DEPTH], or [E * WIDTH, DEPTH]
    sorted_ptr,
    blocks_ptr,
    totals_ptr,
    x_smem,
    w_smem,
    full,
    empty,
    DEPTH,
    WIDTH,
    K: gl.constexpr,
    GATED: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_R: gl.constexpr,
):
    """The loader's part, in four warps."""
    GROUPS: gl.constexpr = BLOCK_R // _GROUP_ROWS
    ITEM: gl.constexpr = x_smem.dtype.primitive_bitwidth // 8
    STEP: gl.constexpr = 128 // ITEM
    by_16_bytes: gl.constexpr = gl.BlockedLayout([1, 16 // ITEM], [4, 8], [4, 1], [1, 0])
    if GATHER:
        x_blocks = x_smem._reinterpret(x_smem.dtype, [STAGES, BLOCK_R, STEP], x_smem.type.layout)
    num_blocks = gl.load(totals_ptr)
    tiles_across = gl.cdiv(WIDTH, _COLUMNS if GATED else 2 * _COLUMNS)
    steps = gl.cdiv(DEPTH, STEP)
    n = 0
    for tile in range(gl.program_id(0), num_blocks * tiles_across, gl.num_programs(0)):
        e, start, rows, across = block_of(blocks_ptr, num_blocks, tiles_across, tile, GROUP_R)
        if GATED:
            left = e * 2 * WIDTH + across * _COLUMNS
            right = left + WIDTH
        else:
            left = e * WIDTH + across * 2 * _COLUMNS
            right = left + _COLUMNS
        if GATHER:
            # Rows past the block's own are its last one again: they are multiplied and not stored.
            r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, by_16_bytes))
            slot = gl.load(sorted_ptr + start + gl.minimum(r, rows - 1))
            # int64 before the multiply: rows x hidden passes 2**31.
            row = (slot // K).to(gl.int64)
            x_ptrs = x + row[:, None] * x_stride_r + gl.arange(0, STEP, gl.SliceLayout(0, by_16_bytes))[None, :]
        for step in range(steps):
            stage = n % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * _COLUMNS * 128)
            tma.async_copy_global_to_shared(w_desc, [left, step * STEP], bar, w_smem.index(2 * stage))
            tma.async_copy_global_to_shared(w_desc, [right, step * STEP], bar, w_smem.index(2 * stage + 1))
            if GATHER:
                async_copy.async_copy_global_to_shared(x_blocks.index(stage), x_ptrs + step * STEP)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                for g in gl.static_range(GROUPS):
                    here = rows > g * _GROUP_ROWS
                    mbarrier.expect(bar, _GROUP_ROWS * 128, pred=here)
                    mbarrier.arrive(bar, pred=rows <= g * _GROUP_ROWS)
                    tma.async_copy_global_to_shared(
                        x, [start + g * _GROUP_ROWS, step * STEP], bar, x_smem.index(GROUPS * stage + g), pred=here
                    )
            n += 1


@gluon.jit
def pass_by(full, empty, n, steps, STAGES: gl.constexpr):
    """A warpgroup without rows lets the stages of a tile go; the number of the next step."""
    for _ in range(steps):
        mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
        mbarrier.arrive(empty.index(n % STAGES))
        n += 1
    return n


@gluon.jit
def store_columns(y_ptr, y, sorted_ptr, start, rows, WIDTH, column, GROUP: gl.constexpr):
    """128 columns of a warpgroup's rows, at their positions, or with `sorted_ptr` at their slots."""
    PER_THREAD: gl.constexpr = 128 // y.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = 128 // PER_THREAD
    by_16_bytes: gl.constexpr = gl.BlockedLayout([1, PER_THREAD], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    r = GROUP * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, by_16_bytes))
    c = column + gl.arange(0, _COLUMNS, gl.SliceLayout(0, by_16_bytes))
    row = start + gl.minimum(r, rows - 1)
    if sorted_ptr is not None:
        row = gl.load(sorted_ptr + row)
    y_ptrs = y_ptr + row.to(gl.int64)[:, None] * WIDTH + c[None, :]
    gl.store(y_ptrs, gl.convert_layout(y, by_16_bytes), mask=(r < rows)[:, None] & (c < WIDTH)[None, :])


@gluon.jit
def add_bias(left, right, bias_ptr, e, across, WIDTH, GATED: gl.constexpr):
    """To both accumulators, [E, 2 * WIDTH] or [E, WIDTH]."""
    c = across * (_COLUMNS if GATED else 2 * _COLUMNS) + gl.arange(0, _COLUMNS, gl.SliceLayout(0, left.type.layout))
    left_ptrs = bias_ptr + e.to(gl.int64) * (2 * WIDTH if GATED else WIDTH) + c
    right_ptrs = left_ptrs + (WIDTH if GATED else _COLUMNS)
    in_right = c < (WIDTH if GATED else WIDTH - _COLUMNS)
    left += gl.load(left_ptrs, mask=c < WIDTH, other=0.0).to(gl.float32)[None, :]
    right += gl.load(right_ptrs, mask=in_right, other=0.0).to(gl.float32)[None, :]
    return left, right


@gluon.jit
def weight_of_rows(topk_weights_ptr, sorted_ptr, start, rows, acc, GROUP: gl.constexpr):
    """[64, 1]: the router's weight of each row of a warpgroup, laid out as `acc` is."""
    r = GROUP * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, acc.type.layout))
    return gl.load(topk_weights_ptr + gl.load(sorted_ptr + start + gl.minimum(r, rows - 1)))[:, None]

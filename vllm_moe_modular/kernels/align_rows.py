"""Group (row, k) slots by expert, and cut each expert's group into blocks of rows.

    sorted_slots[offset[e] : offset[e] + count[e]] = the slots s = row * K + k with topk_ids[row, k] == e
    blocks[b] = (expert, first position in sorted_slots, rows in the block), block_rows rows at most

Ids below 0 or past the last expert belong to no group: their slots are in no block and cost nothing later. The order
within a group is ascending up to `ONE_LAUNCH_SLOTS` and not fixed above. Nothing may depend on it: each row is computed
by itself.

Shapes: R rows, K top-k, S = R * K slots, E experts, B blocks.
Cost:   latency bound; nothing is read back to the host. Few slots: one launch, a program per expert that reads all S
        ids, so that nobody waits for anybody. Its work grows with S * E, so many slots take three launches: zero the
        counters, rank every slot in its expert by an atomic addition, place it.
Reference: vllm_moe_modular.reference.align_rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ONE_LAUNCH_SLOTS = 8192
"""Measured with 128 experts on an H200: 6 us against 10 at 4096 slots, 20 against 10 at 16384, 74 against 20 at 65536,
one launch against several."""


@dataclass(frozen=True, slots=True)
class Tile:
    block_s: int  # slots per program
    one_launch: bool
    num_warps: int


def choose_tile(slots: int) -> Tile:
    """Pure and CPU-testable; the launcher takes no other decision."""
    if slots > ONE_LAUNCH_SLOTS:
        return Tile(block_s=256, one_launch=False, num_warps=4)
    block_s = max(32, triton.next_power_of_2(slots))
    return Tile(block_s=block_s, one_launch=True, num_warps=min(16, max(4, block_s // 256)))


def max_blocks(slots: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that `slots` slots can need: every expert may end in a block that is not full."""
    return min(slots, slots // block_rows + min(num_experts, slots))


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """The groups, on the device.

    Attributes:
        sorted_slots: [S] int32; past the last block uninitialised. None: position p is slot p.
        blocks: [B, 4] int32: expert, first position, rows, unused. Past the last block uninitialised.
        totals: [2] int32: number of blocks, number of positions in them.
    """

    sorted_slots: torch.Tensor | None
    blocks: torch.Tensor
    totals: torch.Tensor


def scratch_ints(slots: int, num_experts: int, block_rows: int) -> int:
    """int32 elements of scratch that `align_rows` takes: its results and a counter per expert.

    Never less than for fewer slots, whose blocks `choose_tiles` may make lower: below each of its limits an expert has
    at most two blocks in the mean, and one that is not full.
    """
    return slots + 4 * max(max_blocks(slots, num_experts, block_rows), 3 * num_experts) + num_experts + 4


@triton.jit
def _load_ids(ids_ptr, slots, S, E):
    """int32 ids; -1 where there is no expert here."""
    ids = tl.load(ids_ptr + slots, mask=slots < S, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def _align_in_one_launch_kernel(
    sorted_ptr,  # [S]
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2]
    ids_ptr,  # [S] int32 or int64
    S,
    E,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, BLOCK_S)
    ids = _load_ids(ids_ptr, slots, S, E)
    counts = tl.histogram(tl.maximum(ids, 0), BLOCK_E, mask=ids >= 0)
    start = tl.sum(tl.where(experts < e, counts, 0), 0)
    mine = (ids == e).to(tl.int32)
    tl.store(sorted_ptr + start + tl.cumsum(mine, 0) - 1, slots, mask=mine == 1)

    its_blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.sum(tl.where(experts < e, its_blocks, 0), 0)
    count = tl.sum(tl.where(experts == e, counts, 0), 0)
    for first in range(0, tl.cdiv(count, BLOCK_ROWS), 32):
        j = first + tl.arange(0, 32)
        entry = blocks_ptr + (first_block + j) * 4
        in_j = j * BLOCK_ROWS < count
        tl.store(entry, j * 0 + e, mask=in_j)
        tl.store(entry + 1, start + j * BLOCK_ROWS, mask=in_j)
        tl.store(entry + 2, tl.minimum(count - j * BLOCK_ROWS, BLOCK_ROWS), mask=in_j)
    if e == 0:
        tl.store(totals_ptr, tl.sum(its_blocks, 0))
        tl.store(totals_ptr + 1, tl.sum(counts, 0))


@triton.jit
def _rank_kernel(
    ranks_ptr,  # [S]
    counters_ptr,  # [E], zeroed
    ids_ptr,  # [S] int32 or int64
    S,
    E,
    BLOCK_S: tl.constexpr,
):
    slots = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    ids = _load_ids(ids_ptr, slots, S, E)
    rank = tl.atomic_add(counters_ptr + tl.maximum(ids, 0), 1, mask=ids >= 0, sem="relaxed")
    tl.store(ranks_ptr + slots, rank, mask=ids >= 0)


@triton.jit
def _place_kernel(
    sorted_ptr,  # [S]
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2]
    ranks_ptr,  # [S]
    counters_ptr,  # [E] slots of each expert
    ids_ptr,  # [S] int32 or int64
    S,
    E,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counters_ptr + experts, mask=experts < E, other=0)
    starts = tl.cumsum(counts, 0) - counts
    slots = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    ids = _load_ids(ids_ptr, slots, S, E)
    rank = tl.load(ranks_ptr + slots, mask=ids >= 0, other=0)
    position = tl.gather(starts, tl.maximum(ids, 0), 0) + rank
    tl.store(sorted_ptr + position, slots.to(tl.int32), mask=ids >= 0)
    if tl.program_id(0) == 0:
        its_blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
        first_block = tl.cumsum(its_blocks, 0) - its_blocks
        for j in range(tl.max(its_blocks, 0)):
            in_j = j < its_blocks
            entry = blocks_ptr + (first_block + j) * 4
            tl.store(entry, experts, mask=in_j)
            tl.store(entry + 1, starts + j * BLOCK_ROWS, mask=in_j)
            tl.store(entry + 2, tl.minimum(counts - j * BLOCK_ROWS, BLOCK_ROWS), mask=in_j)
        tl.store(totals_ptr, tl.sum(its_blocks, 0))
        tl.store(totals_ptr + 1, tl.sum(counts, 0))


def align_rows(
    topk_ids_RK: torch.Tensor,
    num_experts: int,
    block_rows: int,
    *,
    scratch: torch.Tensor,
    ranks_S: torch.Tensor | None = None,
    pdl: bool = False,
) -> AlignedRows:
    """Group the slots by expert.

    Args:
        topk_ids_RK: [R, K], int32 or int64, contiguous; R > 0.
        num_experts: ids from here on are dropped, as are ids below 0.
        block_rows: rows per block at most.
        scratch: int32, `scratch_ints` elements, uninitialised.
        ranks_S: [S] int32, which many slots are ranked in, and which is free again when this is done; None: allocated.
        pdl: let the next kernel be launched early; it has to wait for this one itself.
    """
    S, E = topk_ids_RK.numel(), num_experts
    B = max_blocks(S, E, block_rows)
    blocks, sorted_slots, counters, totals = scratch[: 4 * B + S + E + 4].split([4 * B, S, E, 4])
    blocks = blocks.view(B, 4)
    tile = choose_tile(S)
    step = {"BLOCK_S": tile.block_s, "num_warps": tile.num_warps}
    cut = {"BLOCK_E": max(2, triton.next_power_of_2(E)), "BLOCK_ROWS": block_rows}
    if tile.one_launch:
        _align_in_one_launch_kernel[(E,)](sorted_slots, blocks, totals, topk_ids_RK, S, E, **step, **cut, PDL=pdl)
    else:
        grid = (triton.cdiv(S, tile.block_s),)
        ranks = torch.empty_like(sorted_slots) if ranks_S is None else ranks_S
        counters.zero_()
        _rank_kernel[grid](ranks, counters, topk_ids_RK, S, E, **step)
        _place_kernel[grid](sorted_slots, blocks, totals, ranks, counters, topk_ids_RK, S, E, **step, **cut)
    return AlignedRows(sorted_slots=sorted_slots, blocks=blocks, totals=totals[:2])

"""Give each (row, k) slot a row in a layout where the rows of every expert begin at a multiple of `alignment`.

    start[e] = sum over e' < e of count[e'], each rounded up to `alignment`
    positions[slot] = start[e] + rank of the slot among those of its expert e; -1 where the id is no expert here
    ends[e] = start[e] + count[e]

The rows from ends[e] to start[e + 1] belong to no slot: nobody writes them, and what is computed of them is never read.
The order within an expert is not fixed. Nothing may depend on it: each row is computed by itself.

Shapes: R rows, K top-k, S = R * K slots, E experts, N chunks of slots.
Cost:   latency bound; nothing is read back to the host. Two launches, each a program per chunk: count every expert's
        slots within the chunk, which ranks them; add up what lies before the chunk, N * E counts per program.
Reference: vllm_moe_modular.reference.place_rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK_SLOTS = 1024
"""Slots per program: 8192 rows of top 8 are 64 programs of 64 x E counts to add up."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where the rows are, on the device.

    Attributes:
        positions: [S] int32; -1 where a slot has no row.
        ends: [E] int32: one past the last row of each expert; the first is the end before, rounded up to `alignment`.
    """

    positions: torch.Tensor
    ends: torch.Tensor


def max_placed_rows(slots: int, num_experts: int, alignment: int) -> int:
    """The most rows that `slots` slots can need, known to the host: a multiple of `alignment`."""
    return alignment * ((slots + min(slots, num_experts) * (alignment - 1)) // alignment)


def scratch_ints(slots: int, num_experts: int) -> int:
    """int32 elements of scratch that `place_rows` takes: its results, and a counter per chunk and expert."""
    return slots + num_experts + -(-slots // CHUNK_SLOTS) * num_experts


@triton.jit
def _load_ids(ids_ptr, slots, S, E):
    """int32 ids; -1 where there is no expert here."""
    ids = tl.load(ids_ptr + slots, mask=slots < S, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def _rank_in_chunk_kernel(
    ranks_ptr,  # [S]
    counts_ptr,  # [N, E]
    ids_ptr,  # [S] int32 or int64
    S,
    E,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    counters_ptr = counts_ptr + chunk * E
    tl.store(counters_ptr + experts, tl.zeros([BLOCK_E], dtype=tl.int32), mask=experts < E)
    tl.debug_barrier()  # this program's counters are zero before any of its threads counts
    slots = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    ids = _load_ids(ids_ptr, slots, S, E)
    rank = tl.atomic_add(counters_ptr + tl.maximum(ids, 0), 1, mask=ids >= 0, sem="relaxed")
    tl.store(ranks_ptr + slots, rank, mask=ids >= 0)


@triton.jit
def _place_kernel(
    positions_ptr,  # [S], ranks within the chunk; positions once this is through
    ends_ptr,  # [E]
    counts_ptr,  # [N, E]
    ids_ptr,  # [S] int32 or int64
    S,
    E,
    N,
    ALIGNMENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    slots = chunk * BLOCK_S + tl.arange(0, BLOCK_S)
    ids = _load_ids(ids_ptr, slots, S, E)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_E], dtype=tl.int32)
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)[:, None]
        counts = tl.load(counts_ptr + n * E + experts[None, :], mask=(n < N) & (experts[None, :] < E), other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(n < chunk, counts, 0), 0)
    padded = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    start = tl.cumsum(padded, 0) - padded
    rank = tl.load(positions_ptr + slots, mask=ids >= 0, other=0)
    position = tl.gather(start + before, tl.maximum(ids, 0), 0) + rank
    tl.store(positions_ptr + slots, tl.where(ids >= 0, position, -1), mask=slots < S)
    if chunk == 0:
        tl.store(ends_ptr + experts, start + total, mask=experts < E)


def place_rows(
    topk_ids_RK: torch.Tensor, num_experts: int, alignment: int, *, scratch: torch.Tensor, pdl: bool = False
) -> PlacedRows:
    """Give the slots their rows.

    Args:
        topk_ids_RK: [R, K], int32 or int64, contiguous; R > 0.
        num_experts: ids from here on have no row, nor have ids below 0.
        scratch: int32, `scratch_ints` elements, uninitialised.
        pdl: let the next kernel be launched early; it has to wait for this one itself.
    """
    S, E = topk_ids_RK.numel(), num_experts
    N = triton.cdiv(S, CHUNK_SLOTS)
    ends, counts, positions = scratch[: scratch_ints(S, E)].split([E, N * E, S])
    block_e = max(2, triton.next_power_of_2(E))
    chunk = {"BLOCK_S": CHUNK_SLOTS, "BLOCK_E": block_e, "PDL": pdl, "num_warps": 8}
    _rank_in_chunk_kernel[(N,)](positions, counts, topk_ids_RK, S, E, **chunk)
    _place_kernel[(N,)](
        positions, ends, counts, topk_ids_RK, S, E, N,
        ALIGNMENT=alignment, BLOCK_N=max(1, 4096 // block_e), **chunk, launch_pdl=pdl,
    )  # fmt: skip
    return PlacedRows(positions=positions, ends=ends)

"""Combine: the experts' rows back to the ranks that their tokens came from, added up there.

On rank v, for token t of v, with y_w the rows of the experts on rank w and summed over the ranks w that hold one of the
token's experts, in the order of the ranks, in float32, rounded once:

    out[t, :] = sum over w of y_w[v * N + t, :]

One row per token and rank crosses the link; the own rank's share is read where it is. A token without experts gets 0.

Programs come in pairs that share tokens: p < P' sends, P' + p adds. Tokens are cut into chunks. The sender stores its
chunk into `partials` of every peer and sets flag [rank, p] there to the number of chunks sent so far; the adder waits
for that of every peer, adds and writes the output, while the sender is already at the next chunk: all but the last
additions hide behind the link.

Order: rows of a chunk -> `signal` (release, system) by sender p -> `await_signal` (acquire, system) by adder p of the
peer -> its loads. Senders never wait, so that they always come to an end and make room; adders take half of a
multiprocessor's threads and registers at most, so that both of a pair run at the same time, and the senders of another
call in flight find room beside its adders. Launched early as
`nvlink_dispatch` is.
The ids of all peers' rows are read before the last flags are set: peers may overwrite them from then on. Why the
partials may be overwritten: `nvlink_memory`.

Shapes: T tokens of this rank, N tokens of the fullest rank, W ranks, K top-k, H hidden, P programs.
Cost:   per link and direction at most N * H * itemsize bytes; memory: W * N * H read and written for the way, W * T * H
        read and T * H written for the sum (the rows that just arrived come from L2).
Reference: the formula in torch, `check_combined` in tests/kernels/test_nvlink_kernels.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.launch import has_dependent_launch
from vllm_moe_modular.kernels.nvlink_memory import MAX_PROGRAMS, PEER_UNIT_BYTES, NvlinkSlot
from vllm_moe_modular.kernels.nvlink_signal import COMBINE, await_signal, set_counter, signal

CHUNK_BYTES = 32 * 1024
"""Per flag in a large step: a flag costs its sender the way to the peer and back, and the last chunk's additions have
nothing left to hide behind. Measured best from 7168 columns of bf16 (two rows) to 2048 (eight)."""


REGISTERS = 64 * 1024
"""Of a multiprocessor, from Volta to Blackwell."""


@dataclass(frozen=True, slots=True)
class Tile:
    programs: int  # pairs
    chunk_rows: int
    tile_rows: int  # of a chunk in flight at a time in one program
    num_warps: int


def choose_tile(rows_per_rank: int, row_bytes: int) -> Tile:
    """Pure and CPU-testable; the same on every rank, because programs wait for their like."""
    programs = min(MAX_PROGRAMS, rows_per_rank)
    num_warps = max(1, min(16, triton.next_power_of_2(row_bytes) // 512))
    chunk_rows = 1
    while chunk_rows * 2 * row_bytes <= CHUNK_BYTES and chunk_rows * programs < rows_per_rank:
        chunk_rows *= 2
    tile_rows = 1
    while tile_rows * 2 <= chunk_rows and tile_rows * 2 * row_bytes <= num_warps * 32 * 64:
        tile_rows *= 2
    return Tile(programs=programs, chunk_rows=chunk_rows, tile_rows=tile_rows, num_warps=num_warps)


def most_registers(num_warps: int) -> int:
    """Of a thread, so that two programs fit on a multiprocessor; left alone, the sums of eight ranks take more."""
    return min(255, REGISTERS // (2 * 32 * num_warps))


@triton.jit(do_not_specialize=["T", "N", "pairs", "first_program", "timeout_ns"])
def _nvlink_combine_kernel(
    out_ptr,  # [T, H]
    y_ptr,  # [W * N, H]
    partials_ptr,  # [(W - 1) * N, H]
    flags_ptr,  # [W, P] int32
    row_ids_ptr,  # [W * N, K] int32
    ranks_of_token_ptr,  # [T] int32
    peers_ptr,  # [W] int64
    counters_ptr,  # [3, P] int32: calls, chunks sent, chunks added
    failure_ptr,
    host_failure_ptr,
    T,
    N,
    pairs,
    first_program,
    timeout_ns,
    RANK: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,  # elements of a row in one unit of peers_ptr
    PHASE: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0) + first_program
    sends = program < pairs
    p = tl.where(sends, program, program - pairs)
    counter_ptr = counters_ptr + tl.where(sends, P, 2 * P) + p
    chunk = tl.load(counter_ptr)
    k = tl.arange(0, BLOCK_K)
    h = tl.arange(0, BLOCK_H)
    in_H = (h < H)[None, :]
    for i in range(tl.cdiv(N, pairs * CHUNK_ROWS)):
        chunk += 1
        start = (i * pairs + p) * CHUNK_ROWS
        if sends:
            for d in tl.static_range(1, W):
                w = (RANK + d) % W
                peer = tl.load(peers_ptr + w)
                for first in range(0, CHUNK_ROWS, TILE_ROWS):
                    t = start + first + tl.arange(0, TILE_ROWS)
                    row = w * N + t
                    in_NK = (t < N)[:, None] & (k < K)[None, :]
                    ids = tl.load(row_ids_ptr + row[:, None] * K + k[None, :], mask=in_NK, other=-1)
                    y = tl.load(y_ptr + row.to(tl.int64)[:, None] * H + h[None, :], mask=(t < N)[:, None] & in_H)
                    came = tl.max(ids, 1) >= 0
                    # To w, this rank is the one at distance W - d.
                    to_TH = peer * UNIT + ((W - d - 1) * N + t).to(tl.int64)[:, None] * H + h[None, :]
                    tl.store(partials_ptr + to_TH, y, mask=came[:, None] & in_H)
            for d in tl.static_range(1, W):
                w = (RANK + d) % W
                signal(flags_ptr + tl.load(peers_ptr + w) * 4 + RANK * P + p, chunk)
        else:
            for d in tl.static_range(1, W):
                w = (RANK + d) % W
                await_signal(
                    flags_ptr + w * P + p, chunk, failure_ptr, host_failure_ptr, counters_ptr, w, PHASE, timeout_ns
                )  # fmt: skip
            for first in range(0, CHUNK_ROWS, TILE_ROWS):
                t = start + first + tl.arange(0, TILE_ROWS)
                ranks = tl.load(ranks_of_token_ptr + t, mask=t < T, other=0)
                acc = tl.zeros([TILE_ROWS, BLOCK_H], dtype=tl.float32)
                for source in tl.static_range(W):
                    from_ptr = y_ptr if source == RANK else partials_ptr
                    row = (RANK if source == RANK else (source - RANK - 1) % W) * N + t
                    came = ((ranks >> source) & 1) > 0
                    from_TH = row.to(tl.int64)[:, None] * H + h[None, :]
                    acc += tl.load(from_ptr + from_TH, mask=came[:, None] & in_H, other=0.0).to(tl.float32)
                to_TH = t.to(tl.int64)[:, None] * H + h[None, :]
                tl.store(out_ptr + to_TH, acc.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & in_H)
    set_counter(counter_ptr, chunk)


def nvlink_combine(
    slot: NvlinkSlot, y_RH: torch.Tensor, *, rows_per_rank: int, timeout_ns: int, out_TH: torch.Tensor,
    halves: str = "send and add",
) -> None:  # fmt: skip
    """Send the experts' rows home, wait for those of this rank's tokens and add them up, on the current stream.

    Args:
        slot: of the dispatch that the rows came from.
        y_RH: [W * N, H], contiguous; rows without an expert here may be uninitialised.
        rows_per_rank: N of that dispatch.
        timeout_ns: how long a peer may be missing.
        out_TH: [T, H], contiguous, T of that dispatch; every element is written.
        halves: "send" and "add" do one of the two. For ranks that are simulated one after the other in one process.
    """
    T, H = out_TH.shape
    K = slot.shape.top_k
    tile = choose_tile(rows_per_rank, H * y_RH.element_size())
    pdl = has_dependent_launch(y_RH.device)
    grid = (tile.programs * (2 if halves == "send and add" else 1),)
    _nvlink_combine_kernel[grid](
        out_TH, y_RH, slot.partials, slot.flags[1], slot.row_ids, slot.ranks_of_token, slot.peers, slot.counters,
        slot.failure, slot.host_failure, T, rows_per_rank,
        tile.programs, tile.programs if halves == "add" else 0, timeout_ns,
        RANK=slot.rank, W=slot.shape.ranks, K=K, H=H, P=MAX_PROGRAMS, UNIT=PEER_UNIT_BYTES // y_RH.element_size(),
        PHASE=COMBINE, CHUNK_ROWS=tile.chunk_rows, TILE_ROWS=tile.tile_rows, BLOCK_K=triton.next_power_of_2(K),
        BLOCK_H=triton.next_power_of_2(H), PDL=pdl, num_warps=tile.num_warps, maxnreg=most_registers(tile.num_warps),
        launch_pdl=pdl,
    )  # fmt: skip

"""Dispatch: each token's row to every rank that holds one of its experts, with local expert ids and weights.

On rank v, for every rank w and token t of w:

    row_ids[w * N + t, k]     = local_id(topk_ids_w[t, k]) if that expert is on v, else -1      (-1 for t >= T_w)
    row_weights[w * N + t, k] = topk_weights_w[t, k]       where row_ids >= 0
    rows[w * N + t, :]        = x_w[t, :]                  where some row_ids[w * N + t, :] >= 0

or, with the rows in fp8, rows[w * N + t, :], row_scales[w * N + t, :] = quantize_fp8(x_w[t, :]): quantised once, by the
program that reads the token, for all ranks that it goes to.

What is not here is not written and keeps what an earlier step left. A token's row is its number, so nothing is counted,
sorted or compacted, the result does not depend on timing, and the host knows the number of rows: R = W * N.

Program p of a rank takes tiles of its tokens, reads a tile once and stores it to all that need it, the own rank among
them; then it sets flag [rank, p] on every peer and waits for flag [w, p] of every peer w.

Order: rows, scales, ids and weights -> `signal` (release, system) by program p -> `await_signal` (acquire, system) by
program p of the peer -> end of the kernel, which all p reach -> the experts. No program waits before it has sent, so
that ranks need not start together, nor all programs of a rank at once; the waiting ones take half of the device's
threads at most, which leaves the kernels of another call in flight room to send. Where the device can, programs are
launched while the kernel before is still ending, and begin when it has ended: nothing happens above `gdc_wait`.
Why the peers' buffers may be overwritten: `nvlink_memory`.

Shapes: T tokens of this rank, N tokens of the fullest rank, W ranks, K top-k, H hidden, G global experts, P programs.
Cost:   per link and direction at most N * (H * itemsize + 8 * K) bytes, nearly all of it rows (in fp8 an itemsize of
        1 + 4 / 128); memory: T * H read, R * H written.
Reference: the formula in torch, `check_dispatched` in tests/kernels/test_nvlink_kernels.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.launch import has_dependent_launch
from vllm_moe_modular.kernels.nvlink_memory import MAX_PROGRAMS, PEER_UNIT_BYTES, NvlinkSlot
from vllm_moe_modular.kernels.nvlink_signal import DISPATCH, await_signal, set_counter, signal
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, quantized

HOME_SHIFT = 16
"""In a table of homes: expert g is number `home & 0xFFFF` on rank `home >> HOME_SHIFT`."""


@dataclass(frozen=True, slots=True)
class Tile:
    programs: int
    tile_rows: int  # tokens whose rows are in flight at a time in one program
    num_warps: int


def choose_tile(rows_per_rank: int, row_bytes: int) -> Tile:
    """Pure and CPU-testable; the same on every rank, because programs wait for their like.

    Args:
        row_bytes: as read, before they are quantised.
    """
    programs = min(MAX_PROGRAMS, rows_per_rank)
    num_warps = max(1, min(16, triton.next_power_of_2(row_bytes) // 512))
    tile_rows = 1
    # Up to 64 bytes per thread in flight, in rows that the program has anyway.
    while tile_rows * 2 * row_bytes <= num_warps * 32 * 64 and tile_rows * 2 * programs <= rows_per_rank:
        tile_rows *= 2
    return Tile(programs=programs, tile_rows=tile_rows, num_warps=num_warps)


@triton.jit(do_not_specialize=["T", "N", "timeout_ns"])
def _nvlink_dispatch_kernel(
    rows_ptr,  # [W * N, H]
    row_scales_ptr,  # [W * N, H / GROUP], or None: rows are sent as they are
    row_ids_ptr,  # [W * N, K] int32
    row_weights_ptr,  # [W * N, K] float32
    flags_ptr,  # [W, P] int32
    x_ptr,  # [T, H]
    ids_ptr,  # [T, K] int32 or int64
    weights_ptr,  # [T, K] float32
    home_ptr,  # [G] int32
    ranks_of_token_ptr,  # [T] int32
    peers_ptr,  # [W] int64
    calls_ptr,  # [P] int32
    failure_ptr,
    host_failure_ptr,
    T,
    N,
    G,
    timeout_ns,
    RANK: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,  # elements of a row in one unit of peers_ptr
    HOME_SHIFT: tl.constexpr,
    PHASE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    WAIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    call = tl.load(calls_ptr + p) + 1
    k = tl.arange(0, BLOCK_K)
    h = tl.arange(0, BLOCK_H)
    g = tl.arange(0, BLOCK_H // GROUP)
    for start in range(p * TILE_ROWS, N, tl.num_programs(0) * TILE_ROWS):
        t = start + tl.arange(0, TILE_ROWS)
        in_TK = (t < T)[:, None] & (k < K)[None, :]
        at_TK = t[:, None] * K + k[None, :]
        in_TH = (t < T)[:, None] & (h < H)[None, :]
        x = tl.load(x_ptr + t.to(tl.int64)[:, None] * H + h[None, :], mask=in_TH, other=0.0)
        if row_scales_ptr is not None:
            groups = x.to(tl.float32).reshape(TILE_ROWS * (BLOCK_H // GROUP), GROUP)
            values, scales = quantized(groups)
            x = values.reshape(TILE_ROWS, BLOCK_H)
            scales = scales.reshape(TILE_ROWS, BLOCK_H // GROUP)
        ids = tl.load(ids_ptr + at_TK, mask=in_TK, other=-1)
        weights = tl.load(weights_ptr + at_TK, mask=in_TK, other=0.0)
        home = tl.load(home_ptr + ids, mask=(ids >= 0) & (ids < G), other=-1)
        ranks = tl.zeros([TILE_ROWS], dtype=tl.int32)
        # The own rank comes last: what has a long way to go starts first, and no two ranks start with the same peer.
        for d in tl.static_range(1, W + 1):
            w = (RANK + d) % W
            here = (home >> HOME_SHIFT) == w
            goes = tl.max(here.to(tl.int32), 1)
            ranks |= goes << w
            peer = tl.load(peers_ptr + w)
            row = RANK * N + t
            to_TK = peer * 4 + row[:, None] * K + k[None, :]
            in_NK = (t < N)[:, None] & (k < K)[None, :]
            tl.store(row_ids_ptr + to_TK, tl.where(here, home & ((1 << HOME_SHIFT) - 1), -1), mask=in_NK)
            tl.store(row_weights_ptr + to_TK, weights, mask=here)
            to_TH = peer * UNIT + row.to(tl.int64)[:, None] * H + h[None, :]
            tl.store(rows_ptr + to_TH, x, mask=(goes > 0)[:, None] & (h < H)[None, :])
            if row_scales_ptr is not None:
                to_TG = peer * 4 + row[:, None] * (H // GROUP) + g[None, :]
                tl.store(row_scales_ptr + to_TG, scales, mask=(goes > 0)[:, None] & (g < H // GROUP)[None, :])
        tl.store(ranks_of_token_ptr + t, ranks, mask=t < T)
    set_counter(calls_ptr + p, call)
    for d in tl.static_range(1, W):
        w = (RANK + d) % W
        signal(flags_ptr + tl.load(peers_ptr + w) * 4 + RANK * P + p, call)
    if WAIT:
        for d in tl.static_range(1, W):
            w = (RANK + d) % W
            await_signal(
                flags_ptr + w * P + p, call, failure_ptr, host_failure_ptr, calls_ptr, w, PHASE, timeout_ns
            )  # fmt: skip


def nvlink_dispatch(
    slot: NvlinkSlot, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor,
    home_G: torch.Tensor, *, rows_per_rank: int, timeout_ns: int, wait: bool = True,
) -> None:  # fmt: skip
    """Send this rank's tokens and wait for those of all others, on the current stream.

    Args:
        slot: not in use by another call.
        x_TH: [T, H], contiguous.
        topk_ids_TK: [T, K], contiguous; ids outside 0 to G - 1 mean no expert.
        topk_weights_TK: [T, K], float32, contiguous.
        home_G: [G], int32, see `HOME_SHIFT`.
        rows_per_rank: N, the same on every rank; at least 1 and T.
        timeout_ns: how long a peer may be missing.
        wait: False leaves the waiting out. For ranks that are simulated one after the other in one process.
    """
    T, H = x_TH.shape
    K = topk_ids_TK.shape[1]
    tile = choose_tile(rows_per_rank, H * x_TH.element_size())
    pdl = has_dependent_launch(x_TH.device)
    _nvlink_dispatch_kernel[(tile.programs,)](
        slot.rows, slot.row_scales, slot.row_ids, slot.row_weights, slot.flags[0],
        x_TH, topk_ids_TK, topk_weights_TK, home_G,
        slot.ranks_of_token, slot.peers, slot.counters[0], slot.failure, slot.host_failure,
        T, rows_per_rank, home_G.shape[0], timeout_ns,
        RANK=slot.rank, W=slot.shape.ranks, K=K, H=H, P=MAX_PROGRAMS, UNIT=PEER_UNIT_BYTES // slot.rows.element_size(),
        HOME_SHIFT=HOME_SHIFT, PHASE=DISPATCH, TILE_ROWS=tile.tile_rows, BLOCK_K=triton.next_power_of_2(K),
        BLOCK_H=triton.next_power_of_2(H), GROUP=1 if slot.row_scales is None else GROUP, WAIT=wait, PDL=pdl,
        num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip

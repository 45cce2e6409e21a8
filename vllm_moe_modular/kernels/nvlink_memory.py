"""The memory of one `nvlink` all-to-all: what lies where in the symmetric buffer, and what stays on the own device.

Every rank lays its symmetric buffer out alike, so that an address here becomes the same place on peer w by adding one
number, how far w's buffer is mapped from ours. A slot serves one call in flight; two slots, two micro-batches.

Letters: W ranks, C the most tokens that a rank brings to one step, N <= C the most tokens of any rank in this step,
K top-k, H hidden, P programs that a kernel may have.

    rows         [W * C, H]        dispatched rows; a step uses [W * N, H], token t of rank w in row w * N + t
    row_scales   [W * C, H / 128]  where rows are in fp8, the scales of each; used as [W * N, H / 128]
    row_ids      [W * C, K]        their local expert ids, -1 = not here; used as [W * N, K]
    row_weights  [W * C, K]        their router weights; used as [W * N, K]
    partials     [(W - 1) * C, H]  combined rows; used as [(W - 1) * N, H], rank me + d's of token t in (d - 1) * N + t
    flags        [2, W, P]         dispatch, then combine: how far program p of rank w has come

Why a single buffer per slot is enough. On one slot every rank runs dispatch 1, experts 1, combine 1, dispatch 2, ...
and each kernel starts when the one before it has ended. A kernel ends when it has seen the flags of all peers.
 - `rows`, `row_scales`, `row_ids`, `row_weights` of call n are read by the experts of call n and, the ids, by the
   sending programs of combine n. A peer writes those of call n + 1 in its dispatch n + 1, so after its combine n ended,
   so after each of our sending programs has set its last flag of call n, which it does after its last read of the ids
   of *any* rank.
   (Of any rank: N differs from call to call, so that rows of call n + 1 from one rank lie where those of another lay.)
 - `partials` of call n are read by the adding programs of combine n. A peer writes those of call n + 1 in its combine
   n + 1, so after its dispatch n + 1 ended, so after our dispatch n + 1 began, so after our combine n ended.
So a rank is never more than one kernel ahead of another, and a flag never more than one call ahead of whoever waits for
it. Two calls in flight share nothing but the clock: another slot has other rows, other flags and other counters.
`tests/kernels/test_nvlink_protocol.py` walks through all interleavings.
"""

import math
from dataclasses import dataclass

import torch

from vllm_moe_modular.kernels.quantize_fp8 import GROUP

MAX_PROGRAMS = 128
"""P. Fewer than an H200 has multiprocessors (132): each program can run at once, and 4096 tokens divide evenly."""

MAX_RANKS = 32
"""The ranks that a token goes to are kept as the bits of an int32."""

PEER_UNIT_BYTES = 16
"""What distances to peers are counted in: keeps addresses on peers provably aligned for 16-byte accesses."""

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class NvlinkShape:
    """What the buffers are reserved for; the same on every rank.

    Attributes:
        dtype: of tokens and of what comes home.
        fp8_rows: tokens are sent in float8_e4m3fn with scales; `hidden` is a multiple of 128.
    """

    ranks: int
    capacity_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    fp8_rows: bool = False

    def symmetric_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what peers write to, in the order in which it lies in the buffer of a slot."""
        W, C, K, H = self.ranks, self.capacity_tokens, self.top_k, self.hidden
        scales = {"row_scales": ((W * C, H // GROUP), torch.float32)} if self.fp8_rows else {}
        return {
            "flags": ((2, W, MAX_PROGRAMS), torch.int32),
            "row_ids": ((W * C, K), torch.int32),
            "row_weights": ((W * C, K), torch.float32),
            **scales,
            "rows": ((W * C, H), torch.float8_e4m3fn if self.fp8_rows else self.dtype),
            "partials": (((W - 1) * C, H), self.dtype),
        }

    @property
    def slot_bytes(self) -> int:
        """Symmetric memory of one slot."""
        return sum(_padded_bytes(shape, dtype) for shape, dtype in self.symmetric_tensors().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkSlot:
    """Everything that the kernels of one call in flight work on; see the top of this file for the shapes.

    Attributes:
        rank: this rank.
        row_scales: None unless the rows are in fp8.
        peers: [W], int64: how far each peer's buffer is mapped from ours, in `PEER_UNIT_BYTES`.
        counters: [3, P], int32: calls of each dispatch program; chunks sent, and chunks added, by each combine program.
            Each element belongs to one program.
        ranks_of_token: [C], int32: bit w: token t of this rank has an expert on rank w. From dispatch to combine.
        failure: [1], int32, not 0 once a wait was given up: then no further wait of this process waits.
        host_failure: [1], int64, readable by the host at any time: `unpack_failure`.
    """

    shape: NvlinkShape
    rank: int
    rows: torch.Tensor
    row_ids: torch.Tensor
    row_weights: torch.Tensor
    partials: torch.Tensor
    flags: torch.Tensor
    peers: torch.Tensor
    counters: torch.Tensor
    ranks_of_token: torch.Tensor
    failure: torch.Tensor
    host_failure: torch.Tensor
    row_scales: torch.Tensor | None = None


def make_slot(
    shape: NvlinkShape, buffer: torch.Tensor, *, rank: int, peers: torch.Tensor, failure: torch.Tensor,
    host_failure: torch.Tensor,
) -> NvlinkSlot:  # fmt: skip
    """Lay a slot out in `buffer`, `slot_bytes` of zeroed symmetric memory."""
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, (size, dtype) in shape.symmetric_tensors().items():
        views[name] = buffer[start : start + math.prod(size) * dtype.itemsize].view(dtype).view(size)
        start += _padded_bytes(size, dtype)
    return NvlinkSlot(
        shape=shape,
        rank=rank,
        peers=peers,
        counters=torch.zeros((3, MAX_PROGRAMS), dtype=torch.int32, device=buffer.device),
        ranks_of_token=torch.zeros(shape.capacity_tokens, dtype=torch.int32, device=buffer.device),
        failure=failure,
        host_failure=host_failure,
        **views,
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A wait that was given up.

    Attributes:
        phase: "dispatch" or "combine".
        rank: that nothing came from.
        call: how many calls this slot had begun, modulo 2**31.
    """

    phase: str
    rank: int
    call: int


def unpack_failure(word: int) -> Failure | None:
    """What `nvlink_signal` wrote into `NvlinkSlot.host_failure`; None: nothing failed."""
    if word == 0:
        return None
    return Failure("dispatch" if word >> 48 == 1 else "combine", word >> 32 & 0xFFFF, word & 0x7FFFFFFF)


def _padded_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(size) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

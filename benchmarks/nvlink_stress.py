"""The `nvlink` kernels over many random steps, every element compared: all ranks on one GPU, a stream for each.

    python -m benchmarks.nvlink_stress [--steps 100000] [--ranks 2 3] [--fp8] [--seed N]

The kernels of the ranks run at the same time and wait for each other, as on GPUs of their own; one process holds all
buffers. A memory checker wants each rank in a process of its own, because it runs one kernel of a process at a time:
compute-sanitizer python -m benchmarks.deepep_smoke --ranks 2 --parts nvlink --checks "200 random steps".

Steps have random sizes, ids and delays; one in four puts a second call into flight, finalized first. Whatever no peer
may be writing is poisoned before each step, and what the experts were given once they have read it.

Letters: W ranks, T tokens of a rank in a step, N of the fullest one, K top-k, H hidden, G experts, M tokens drawn.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from vllm_moe_modular.kernels import nvlink_combine, nvlink_dispatch
from vllm_moe_modular.kernels.nvlink_dispatch import HOME_SHIFT
from vllm_moe_modular.kernels.nvlink_memory import (
    MAX_PROGRAMS,
    PEER_UNIT_BYTES,
    NvlinkShape,
    NvlinkSlot,
    make_slot,
    unpack_failure,
)
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8

H, K, G, CAPACITY = 1024, 8, 48, 512
TIMEOUT_NS = 20 * 10**9
RESERVED = {1 << 28: 1, 1 << 19: 64}  # bytes: how many, of each stream's memory
CUDA = torch.device("cuda")
SIZES = (1, 4, 16, 64, 64, 200, CAPACITY)
CHECK_EVERY = 500


def bits(t: torch.Tensor) -> torch.Tensor:
    """As numbers of as many bytes, so that there are no two zeros."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


@dataclass(frozen=True)
class Drawn:
    """Tokens of one rank to take steps from, and what has to become of each; [M, ...].

    Attributes:
        local: [W, M, K]: the ids as each rank has to receive them.
        goes: [W, M, 1]: which tokens go to each rank.
        values: as sent, in the dtype of the rows; scales: None unless that is fp8.
        home: the sum over ranks of what `experts` makes of them.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    local: torch.Tensor
    goes: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None
    home: torch.Tensor


def draw(W: int, seed: int, kind: str, *, fp8: bool) -> Drawn:
    g = torch.Generator(CUDA).manual_seed(seed)
    M = 2 * CAPACITY
    x = torch.randn(M, H, device=CUDA, generator=g).bfloat16()
    ids = torch.rand(M, G, device=CUDA, generator=g).topk(K).indices.int()
    if kind == "one expert":
        ids[:, 0], ids[:, 1:] = G - 1, -1
    if kind == "holes":
        ids[torch.rand(M, K, device=CUDA, generator=g) < 0.6] = -1
        ids[::7, 0] = G + 3
    homes = torch.tensor([*(homes_of(W)), -1], device=CUDA)
    home = homes[torch.where((ids >= 0) & (ids < G), ids.long(), G)]
    rank_of, local_of = torch.where(home < 0, -1, home >> HOME_SHIFT), home & ((1 << HOME_SHIFT) - 1)
    local = torch.stack([torch.where(rank_of == w, local_of, -1) for w in range(W)])
    goes = (local >= 0).any(2, keepdim=True)
    values, scales = quantize_fp8(x) if fp8 else (x, None)
    out = torch.zeros(M, H, device=CUDA)
    for w in range(W):
        out += torch.where(goes[w], experts(values, scales, w).float(), 0.0)
    weights = torch.rand(M, K, device=CUDA, generator=g)
    return Drawn(x, ids, weights, local.int(), goes, values, scales, out.bfloat16())


def homes_of(W: int) -> list[int]:
    """Of each expert: its rank and its number there, in turns."""
    return [(g % W) << HOME_SHIFT | g // W for g in range(G)]


def experts(values: torch.Tensor, scales: torch.Tensor | None, rank: int) -> torch.Tensor:
    """Any function of row and rank will do."""
    x = values if scales is None else dequantize_fp8(values, scales).bfloat16()
    return x * (rank + 1.5)


def make_slots(W: int, shape: NvlinkShape, device: torch.device = CUDA) -> list[NvlinkSlot]:
    """One for each rank, its peers the buffers of the others."""
    # In one allocation, so that the distances are multiples of the unit.
    buffers = torch.zeros(W, shape.slot_bytes, dtype=torch.uint8, device=device)
    slots = []
    for rank in range(W):
        far = [(b.data_ptr() - buffers[rank].data_ptr()) // PEER_UNIT_BYTES for b in buffers]
        slots.append(
            make_slot(
                shape,
                buffers[rank],
                rank=rank,
                peers=torch.tensor(far, dtype=torch.int64, device=device),
                failure=torch.zeros(1, dtype=torch.int32, device=device),
                host_failure=torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda"),
            )
        )
    return slots


@dataclass(frozen=True)
class Call:
    """One step of all ranks: from each, `counts[w]` of its tokens from `starts[w]` on."""

    drawn: list[Drawn]
    counts: list[int]
    starts: list[int]
    N: int

    def of(self, w: int, t: torch.Tensor) -> torch.Tensor:
        return t[self.starts[w] : self.starts[w] + self.counts[w]]


class Rank:
    """One rank on its stream; `wrong` counts, on the device, the elements that are not what they should be."""

    def __init__(self, rank: int, W: int) -> None:
        self.rank, self.slots = rank, list[NvlinkSlot]()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.home_G = torch.tensor(homes_of(W), dtype=torch.int32, device=CUDA)
        self.wrong = torch.zeros((), dtype=torch.int64, device=CUDA)

    def prepare(self, slot: NvlinkSlot, call: Call) -> None:
        mine = call.drawn[self.rank]
        slot.partials[: (slot.shape.ranks - 1) * call.N].fill_(float("nan"))
        nvlink_dispatch.nvlink_dispatch(
            slot, call.of(self.rank, mine.x), call.of(self.rank, mine.ids), call.of(self.rank, mine.weights),
            self.home_G, rows_per_rank=call.N, timeout_ns=TIMEOUT_NS,
        )  # fmt: skip

    def compute(self, slot: NvlinkSlot, call: Call) -> torch.Tensor:
        """Compares what came, makes the experts' rows of it (NaN where there is no expert), and poisons it."""
        W, N = slot.shape.ranks, call.N
        for w, sent in enumerate(call.drawn):
            T = call.counts[w]
            here = slice(w * N, w * N + T)
            local, goes = call.of(w, sent.local[self.rank]), call.of(w, sent.goes[self.rank])
            wrong = (slot.row_ids[here] != local).sum() + (slot.row_ids[w * N + T : w * N + N] != -1).sum()
            wrong += ((slot.row_weights[here] != call.of(w, sent.weights)) & (local >= 0)).sum()
            wrong += ((bits(slot.rows[here]) != bits(call.of(w, sent.values))) & goes).sum()
            if slot.row_scales is not None and sent.scales is not None:
                wrong += ((slot.row_scales[here] != call.of(w, sent.scales)) & goes).sum()
            self.wrong += wrong
        rows, scales = slot.rows[: W * N], None if slot.row_scales is None else slot.row_scales[: W * N]
        goes = slot.row_ids[: W * N].amax(1, keepdim=True) >= 0
        y = torch.where(goes, experts(rows, scales, self.rank), float("nan"))
        rows.view(torch.uint8).fill_(0xFF)  # NaN, of whatever dtype
        if scales is not None:
            scales.fill_(float("nan"))
        slot.row_weights[: W * N].fill_(float("nan"))
        return y

    def finalize(self, slot: NvlinkSlot, call: Call, y: torch.Tensor) -> None:
        want = call.of(self.rank, call.drawn[self.rank].home)
        out = torch.full_like(want, float("nan"))
        nvlink_combine.nvlink_combine(slot, y, rows_per_rank=call.N, timeout_ns=TIMEOUT_NS, out_TH=out)
        self.wrong += (out != want).sum()

    def step(self, calls: list[tuple[int, Call]], delays: list[int]) -> None:
        """All of `calls`, (slot, what), in flight at once, the last one finalized first."""
        with torch.cuda.stream(self.stream):
            for i, call in calls:
                self.prepare(self.slots[i], call)
            for i, call in reversed(calls):
                torch.cuda._sleep(delays.pop())  # type: ignore[no-untyped-call]
                y = self.compute(self.slots[i], call)
                torch.cuda._sleep(delays.pop())  # type: ignore[no-untyped-call]
                self.finalize(self.slots[i], call, y)


def give_slots(ranks: list[Rank], shape: NvlinkShape) -> None:
    """Two new ones each."""
    first, second = make_slots(len(ranks), shape), make_slots(len(ranks), shape)
    for rank, *slots in zip(ranks, first, second, strict=True):
        rank.slots = slots
    torch.cuda.synchronize()


def reserve_memory(ranks: list[Rank]) -> int:
    """Take what temporaries of each stream may need: to ask the driver for more waits for the kernels that run.

    Returns:
        How often torch has asked so far.
    """
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            sizes = [size for size, n in RESERVED.items() for _ in range(n)]
            _ = [torch.empty(size, dtype=torch.uint8, device=CUDA) for size in sizes]
    return asked_the_driver()


def asked_the_driver() -> int:
    return int(torch.cuda.memory_stats()["num_device_alloc"])  # type: ignore[no-untyped-call]


@contextmanager
def room_for(W: int) -> Iterator[None]:
    """Few enough programs that with all ranks but one waiting, the one still finds multiprocessors without any: those
    with programs that wait take none of a kernel that divides the memory on the chip otherwise."""

    def with_room(choose: Callable[[int, int], Any], N: int, row_bytes: int) -> Any:
        tile = choose(N, row_bytes)
        return replace(tile, programs=min(tile.programs, MAX_PROGRAMS // (W - 1)))

    with ExitStack() as stack:
        for kernel in (nvlink_dispatch, nvlink_combine):
            stack.enter_context(patch.object(kernel, "choose_tile", partial(with_room, kernel.choose_tile)))
        yield


def load_kernels(ranks: list[Rank], shape: NvlinkShape, drawn: list[Drawn]) -> None:
    """Run every kernel once, in slots that waited in vain before and wait no more: while one waits, none is loaded."""
    give_slots(ranks, shape)
    row_bytes = H * shape.dtype.itemsize
    sizes = {
        replace(nvlink_dispatch.choose_tile(N, row_bytes), programs=0): N for N in range(1, CAPACITY + 1)
    } | {
        replace(nvlink_combine.choose_tile(N, row_bytes), programs=0): N for N in range(1, CAPACITY + 1)
    }  # fmt: skip
    for rank in ranks:
        for slot in rank.slots:
            slot.failure.fill_(1)
        for N in sorted(sizes.values(), reverse=True):
            for T in (N, N // 2, 0):  # torch, too, loads a kernel when it first has something to do
                call = Call(drawn, [T] * len(ranks), [0] * len(ranks), N)
                rank.step([(0, call), (1, call)], [0] * 4)
        torch.cuda.synchronize()
        rank.wrong.zero_()


def stress(W: int, steps: int, seed: int, *, fp8: bool) -> None:
    """Raises a RuntimeError at the first element that is wrong, or wait that is given up."""
    shape = NvlinkShape(W, CAPACITY, K, H, torch.bfloat16, fp8)
    ranks = [Rank(rank, W) for rank in range(W)]
    kinds = ("uniform", "holes", "one expert")
    pool = {
        kind: [draw(W, seed + 10 * w + i, kind, fp8=fp8) for w in range(W)] for i, kind in enumerate(kinds)
    }  # fmt: skip
    load_kernels(ranks, shape, pool["uniform"])
    give_slots(ranks, shape)
    asked = reserve_memory(ranks)
    rng = random.Random(seed)

    def random_call() -> Call:
        most = rng.choice(SIZES)
        counts = [rng.randint(0, most) for _ in range(W)]
        N = max(1, *counts) if rng.random() < 0.5 else most
        return Call(pool[rng.choice(kinds)], counts, [rng.randint(0, CAPACITY) for _ in range(W)], N)

    done, began = 0, time.monotonic()
    while done < steps:
        first = rng.randint(0, 1)
        calls = [(first, random_call())]
        if rng.random() < 0.25:
            calls.append((1 - first, random_call()))
        for rank in rng.sample(ranks, W):
            rank.step(calls, [rng.choice((0, 0, 0, 20_000)) for _ in range(2 * len(calls))])
        before, done = done, done + len(calls)
        if done // CHECK_EVERY != before // CHECK_EVERY or done >= steps:
            torch.cuda.synchronize()
            for rank in ranks:
                lost = [unpack_failure(int(slot.host_failure)) for slot in rank.slots]
                if any(lost) or int(rank.wrong):
                    raise RuntimeError(
                        f"rank {rank.rank} of {W}, within {done} steps, seed {seed}: {int(rank.wrong)} elements are "
                        f"wrong; waits given up: {[failure for failure in lost if failure]}; meanwhile torch asked the "
                        f"driver for memory {asked_the_driver() - asked} times"
                    )
    if asked_the_driver() != asked:
        raise RuntimeError("torch asked the driver for memory meanwhile, which waits for kernels: raise RESERVED")
    rows = "fp8 rows" if fp8 else "rows as they are"
    print(f"{W} ranks, {rows}: {done} steps right, seed {seed}, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # with one, streams would wait for each other
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--fp8", action="store_true", help="rows in fp8 with scales")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    args = parser.parse_args()
    for W in args.ranks:
        with room_for(W):
            stress(W, args.steps, args.seed, fp8=args.fp8)


if __name__ == "__main__":
    main()

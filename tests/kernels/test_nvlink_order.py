"""The order of what the `nvlink` kernels themselves touch, for any number of ranks: traced, not modelled.

The kernels run interpreted, rank after rank, and every load, store, flag set and flag waited for is noted with its
program. Flags only grow and nobody branches on data, so what happens before what is a graph, the same in every
interleaving: the order within a program, a kernel after the one before it on its rank's stream, and a flag set before
the wait that needs it. The graph has to order every write of an element against every other access of it.

Letters: W ranks, N tokens of the fullest one, T of one, G experts, K top-k, H hidden, R = W * N rows.
"""

import os
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

import pytest
from triton.runtime import interpreter

from benchmarks.nvlink_stress import homes_of, make_slots
from tests.kernels.common import DEVICE
from vllm_moe_modular.kernels import nvlink_combine, nvlink_dispatch, nvlink_memory
from vllm_moe_modular.kernels.nvlink_memory import NvlinkShape, NvlinkSlot

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="traces Triton's interpreter")
H, K = 4, 2
STEPS = [(5, False), (1, True), (2, True), (7, True), (1, False), (3, True)]
"""N, and whether ranks have fewer: programs come and go, and some steps have several chunks."""

Event = int
Race = tuple[Event, Event]


class Trace:
    """What happened, as events that are numbered in the order of the one run that was traced.

    Attributes:
        before: of each event, those that come directly before it on its rank.
        accesses: by address of an element, the events that touch it and whether each writes.
        signals: by address and value of a flag, the event that set it.
        waits: address, value and event of each wait.
    """

    def __init__(self) -> None:
        self.before: list[list[Event]] = []
        self.accesses: dict[int, list[tuple[Event, bool]]] = defaultdict(list)
        self.signals: dict[tuple[int, int], Event] = {}
        self.waits: list[tuple[int, int, Event]] = []
        self._last_of_stream: dict[int, Event] = {}
        self._start: Event = -1
        self._ends: dict[Hashable, Event] = {}

    def _event(self, *before: Event) -> Event:
        self.before.append([b for b in before if b >= 0])
        return len(self.before) - 1

    @contextmanager
    def kernel(self, stream: int) -> Iterator[None]:
        """Everything inside is of one kernel, after the one before it on the stream."""
        self._start, self._ends = self._event(self._last_of_stream.get(stream, -1)), {}
        yield
        self._last_of_stream[stream] = self._event(self._start, *self._ends.values())

    def step(self) -> Event:
        """The next event of the program that runs."""
        program = tuple(interpreter.interpreter_builder.grid_idx)
        self._ends[program] = self._event(self._ends.get(program, self._start))
        return self._ends[program]

    def touch(self, pointers: Any, mask: Any, *, writes: bool) -> None:
        """The elements at `pointers`, by the program that runs."""
        addresses = set(pointers[mask.astype(bool)].tolist())
        if addresses:
            event = self.step()
            for address in addresses:
                self.accesses[address].append((event, writes))

    def read_by_torch(self, t: torch.Tensor) -> None:
        """Every element, at some time in the kernel that is open."""
        event = self._ends[t.data_ptr()] = self._event(self._start)
        for i in range(t.numel()):
            self.accesses[t.data_ptr() + i * t.element_size()].append((event, False))

    def races(self) -> list[Race]:
        """Pairs of accesses of one element, one of them a write, that nothing orders."""
        earlier, found = self._earlier(), set[Race]()
        for accesses in self.accesses.values():
            for a, a_writes in accesses:
                for b, b_writes in accesses:
                    ordered = earlier[b] >> a & 1 or earlier[a] >> b & 1
                    if a < b and (a_writes or b_writes) and not ordered:
                        found.add((a, b))
        return sorted(found)

    def _earlier(self) -> list[int]:
        """By event, all that come before it in every interleaving, as bits."""
        before = [list(b) for b in self.before]
        for address, value, event in self.waits:
            assert (address, value) in self.signals, "waits for what nobody sets"
            before[event].append(self.signals[address, value])
        after: list[list[Event]] = [[] for _ in before]
        for event, direct in enumerate(before):
            for b in direct:
                after[b].append(event)
        missing, earlier = [len(b) for b in before], [0] * len(before)
        ready = [event for event, n in enumerate(missing) if n == 0]
        for event in ready:
            for b in before[event]:
                earlier[event] |= earlier[b] | 1 << b
            for a in after[event]:
                missing[a] -= 1
                if missing[a] == 0:
                    ready.append(a)
        assert len(ready) == len(before), "ranks wait for each other in a circle"
        return earlier


@contextmanager
def traced(patch: pytest.MonkeyPatch) -> Iterator[Trace]:
    trace, builder = Trace(), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        trace.touch(pointers.data, mask.data, writes=False)
        return load(self, pointers, mask, *rest, **more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        trace.touch(pointers.data, mask.data, writes=True)
        return store(self, pointers, value, mask, *rest, **more)

    def signal(flag: Any, value: Any) -> None:
        key = int(flag.handle.data.item()), int(value.handle.data.item())
        assert key not in trace.signals, "a flag has one writer and grows"
        trace.signals[key] = trace.step()

    def await_signal(flag: Any, value: Any, *_: Any) -> None:
        trace.waits.append((int(flag.handle.data.item()), int(value.handle.data.item()), trace.step()))

    with patch.context() as m:
        m.setattr(builder, "create_masked_load", masked_load)
        m.setattr(builder, "create_masked_store", masked_store)
        for module in (nvlink_dispatch, nvlink_combine):
            m.setattr(module, "signal", signal)
            m.setattr(module, "await_signal", await_signal)
        yield trace


class Ranks:
    """All ranks, one after the other, over one slot each or two."""

    def __init__(self, trace: Trace, W: int, capacity: int, *, slots: int, seed: int, y_is_rows: bool = False) -> None:
        self._trace, self._W, self._y_is_rows = trace, W, y_is_rows
        shape = NvlinkShape(W, capacity, K, H, torch.float32)
        self.slots = [make_slots(W, shape, DEVICE) for _ in range(slots)]
        self._home = torch.tensor(homes_of(W), dtype=torch.int32)
        self._random, self._g = random.Random(seed), torch.Generator().manual_seed(seed)
        self._held: list[torch.Tensor] = []  # an address is of one tensor only

    def _hold(self, t: torch.Tensor) -> torch.Tensor:
        self._held.append(t)
        return t

    def dispatch(self, slots: Sequence[NvlinkSlot], N: int, *, ragged: bool) -> list[int]:
        """T of each rank."""
        counts = [self._random.randint(0, N) if ragged else N for _ in slots]
        for slot, T in zip(slots, counts, strict=True):
            ids = torch.rand(T, len(self._home), generator=self._g).topk(K).indices.int()
            ids[torch.rand(T, K, generator=self._g) < 0.2] = -1
            given = [self._hold(t) for t in (torch.ones(T, H), ids, torch.ones(T, K))]
            with self._trace.kernel(slot.rank):
                nvlink_dispatch.nvlink_dispatch(slot, *given, self._home, rows_per_rank=N, timeout_ns=1)
        return counts

    def experts(self, slots: Sequence[NvlinkSlot], N: int) -> None:
        """Read what arrived, rows only where there is an expert."""
        for slot in slots:
            with self._trace.kernel(slot.rank):
                ids = slot.row_ids[: self._W * N]
                for t in (ids, slot.row_weights[: self._W * N]):
                    self._trace.read_by_torch(t)
                for row in (ids.amax(1) >= 0).nonzero().flatten().tolist():
                    self._trace.read_by_torch(slot.rows[row])

    def combine(self, slots: Sequence[NvlinkSlot], N: int, counts: Sequence[int]) -> None:
        for slot, T in zip(slots, counts, strict=True):
            R = self._W * N
            y, out = slot.rows[:R] if self._y_is_rows else self._hold(torch.zeros(R, H)), self._hold(torch.empty(T, H))
            with self._trace.kernel(slot.rank):
                nvlink_combine.nvlink_combine(slot, y, rows_per_rank=N, timeout_ns=1, out_TH=out)

    def run(self, steps: Sequence[tuple[int, bool]]) -> None:
        """With two slots, two steps are in flight at a time, and the second comes home first."""
        for i in range(0, len(steps), len(self.slots)):
            calls = list(zip(self.slots, steps[i:], strict=False))
            counts = [self.dispatch(slots, N, ragged=ragged) for slots, (N, ragged) in calls]
            for (slots, (N, _)), of_ranks in reversed(list(zip(calls, counts, strict=True))):
                self.experts(slots, N)
                self.combine(slots, N, of_ranks)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs and chunks of two rows, so that little is enough for several of each."""
    for module in (nvlink_memory, nvlink_dispatch, nvlink_combine):
        monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(nvlink_combine, "CHUNK_BYTES", 2 * H * 4)


MANY = [pytest.param(W, marks=pytest.mark.full) for W in (4, 5, 8)]


@pytest.mark.parametrize("slots", [1, 2], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize("W", [2, 3, *MANY])
def test_nothing_is_overwritten_or_read_too_early(W: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch) as trace:
        Ranks(trace, W, capacity=7, slots=slots, seed=W).run(STEPS)
    assert len(trace.waits) > 6 * W, "every step waits"
    assert not trace.races()


def test_a_wait_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(monkeypatch) as trace:
        Ranks(trace, 3, capacity=5, slots=1, seed=0).run([(5, False), (2, True)])
    assert not trace.races()
    waits, needed = trace.waits, 0
    for i in range(len(waits)):
        trace.waits = waits[:i] + waits[i + 1 :]
        needed += bool(trace.races())
    assert needed > len(waits) // 2, "others stand behind a wait for something later"


def test_rows_that_are_combined_where_they_lie_race_with_the_next_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own share is added after the last flag that a peer waits for; so the part copies such rows first."""
    with traced(monkeypatch) as trace:
        Ranks(trace, 2, capacity=7, slots=1, seed=0, y_is_rows=True).run([(4, False), (7, False)])
    assert trace.races()

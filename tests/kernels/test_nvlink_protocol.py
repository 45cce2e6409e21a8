"""The order of things in `nvlink`, over all interleavings: a model of flags, buffers and streams, walked exhaustively.

Modelled: ranks with streams of kernels; kernels that start when the one before them on their stream has ended; programs
of a kernel that run at any relative speed, at most `places` of a rank at once; stores to a peer that arrive at any
later time, in any order; a flag set with release, which waits for its program's stores to arrive, and flags waited for.
Steps differ in size, so that rows of one step lie where other ranks' rows of the step before lay.

Found out: a read that finds anything but what its call's sender wrote, and a state in which nothing can happen.

Reads and arrivals are taken in every order. Steps that nobody can tell apart from later ones (posting a store, setting
a flag that only grows, passing a wait) are taken at once; a program that reads for a while reads twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

Cells = tuple[int, ...]
Tag = tuple[int, int]  # call, rank that wrote


@dataclass(frozen=True)
class Write:
    """Cells of a buffer of `rank`."""

    rank: int
    buffer: str
    cells: Cells
    tag: Tag


@dataclass(frozen=True)
class Signal:
    rank: int
    flag: str
    value: int


@dataclass(frozen=True)
class Wait:
    flag: str
    value: int


@dataclass(frozen=True)
class Read:
    """Cells of a buffer of the own rank, and what must be in them."""

    buffer: str
    cells: Cells
    tag: Tag


Op = Write | Signal | Wait | Read
Program = tuple[Op, ...]
Kernel = tuple[Program, ...]

NOT_STARTED = -1


@dataclass(frozen=True)
class Design:
    """What is modelled; the faults are what tests plant.

    Attributes:
        calls: of each rank: (slot, N, programs), numbered from 0.
        order: what is issued when, as (stream, "dispatch" | "experts" | "combine", call).
        places: how many programs of a rank can run at once.
        shared: buffer names that are one and the same, by slot.
    """

    ranks: int
    calls: tuple[tuple[int, int, int], ...]
    order: tuple[tuple[int, str, int], ...]
    places: int = 1000
    release: bool = True
    dispatch_waits: bool = True
    combine_waits: bool = True
    signals_last: bool = True
    partials_are: str = "partials"

    def kernels(self, rank: int) -> dict[int, list[Kernel]]:
        """Streams of kernels of one rank."""
        builder = _Builder(self, rank)
        streams: dict[int, list[Kernel]] = {}
        for stream, kind, call in self.order:
            streams.setdefault(stream, []).append(getattr(builder, kind)(call))
        return streams


@dataclass
class _Builder:
    """The programs as `nvlink_dispatch` and `nvlink_combine` have them; counters as on the device."""

    design: Design
    rank: int
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def _peers(self) -> list[int]:
        W = self.design.ranks
        return [(self.rank + d) % W for d in range(1, W)]

    def _count(self, counter: str) -> int:
        self.counters[counter] = self.counters.get(counter, 0) + 1
        return self.counters[counter]

    def _tokens(self, call: int) -> Iterator[tuple[int, list[int]]]:
        _, N, programs = self.design.calls[call]
        for p in range(programs):
            yield p, list(range(p, N, programs))

    def dispatch(self, call: int) -> Kernel:
        slot, N, _ = self.design.calls[call]
        kernel = []
        for p, tokens in self._tokens(call):
            count = self._count(f"dispatch {slot} {p}")
            cells = tuple(self.rank * N + t for t in tokens)
            ops: list[Op] = [Write(w, f"rows {slot}", cells, (call, self.rank)) for w in [*self._peers, self.rank]]
            ops += [Signal(w, f"dispatch {slot} {self.rank} {p}", count) for w in self._peers]
            if self.design.dispatch_waits:
                ops += [Wait(f"dispatch {slot} {w} {p}", count) for w in self._peers]
            kernel.append(tuple(ops))
        return tuple(kernel)

    def experts(self, call: int) -> Kernel:
        slot, N, _ = self.design.calls[call]
        reads = [
            Read(f"rows {slot}", tuple(range(w * N, w * N + N)), (call, w)) for w in range(self.design.ranks)
        ]  # fmt: skip
        return ((*reads, *reads),)

    def combine(self, call: int) -> Kernel:
        slot, N, _ = self.design.calls[call]
        W, partials = self.design.ranks, f"{self.design.partials_are} {slot}"
        senders, adders = [], []
        for p, tokens in self._tokens(call):
            count = self._count(f"combine {slot} {p}")
            send: list[Op] = []
            signals = [Signal(w, f"combine {slot} {self.rank} {p}", count) for w in self._peers]
            for w, own_signal in zip(self._peers, signals, strict=True):
                send.append(Read(f"rows {slot}", tuple(w * N + t for t in tokens), (call, w)))
                at = (self.rank - w - 1) % W
                send.append(Write(w, partials, tuple(at * N + t for t in tokens), (call, self.rank)))
                if not self.design.signals_last:
                    send.append(own_signal)
            senders.append(tuple(send + signals * self.design.signals_last))
            waits = [Wait(f"combine {slot} {w} {p}", count) for w in self._peers] * self.design.combine_waits
            reads = [
                Read(partials, tuple((w - self.rank - 1) % W * N + t for t in tokens), (call, w)) for w in self._peers
            ]
            adders.append((*waits, *reads, *reads))
        return (*senders, *adders)


Where = tuple[int, int]  # rank, stream


@dataclass(frozen=True)
class State:
    """Where everything is.

    Attributes:
        at: per (rank, stream), which kernel, and how far each of its programs is.
        pending: stores on their way, with the program that posted them.
        memory: tag by (rank, buffer, cell).
        flags: value by (rank, flag).
    """

    at: tuple[tuple[int, tuple[int, ...]], ...]
    pending: frozenset[tuple[Where, int, int, Write]]
    memory: frozenset[tuple[tuple[int, str, int], Tag]]
    flags: frozenset[tuple[tuple[int, str], int]]


class ViolationError(Exception):
    """The design is wrong."""


class Model:
    """All states that a design can reach."""

    def __init__(self, design: Design) -> None:
        self.design = design
        self.streams = {
            (rank, stream): kernels
            for rank in range(design.ranks)
            for stream, kernels in design.kernels(rank).items()
        }  # fmt: skip
        self.wheres = list(self.streams)

    def explore(self) -> int:
        """The number of states, each with a way on until everything is done.

        Raises:
            ViolationError: the first one that was found.
        """
        start = tuple((0, (NOT_STARTED,) * len(self.streams[w][0])) for w in self.wheres)
        todo = [self._settle(State(start, frozenset(), frozenset(), frozenset()))]
        seen = set(todo)
        while todo:
            state = todo.pop()
            if all(k == len(self.streams[w]) for w, (k, _) in zip(self.wheres, state.at, strict=True)):
                continue
            ways = list(self._ways(state))
            if not ways:
                raise ViolationError(f"stuck: {state.at}")
            for way in map(self._settle, ways):
                if way not in seen:
                    seen.add(way)
                    todo.append(way)
        return len(seen)

    def _ways(self, state: State) -> Iterator[State]:
        """Every arrival, every read, every start of a program that needs a place."""
        for entry in state.pending:
            yield self._arrive(state, entry)
        memory = dict(state.memory)
        for i, (rank, _) in enumerate(self.wheres):
            for program, pc, ops in self._running(state, i):
                op = ops[pc]
                if isinstance(op, Read):
                    for cell in op.cells:
                        if (found := memory.get((rank, op.buffer, cell))) != op.tag:
                            raise ViolationError(f"rank {rank} read {found} in {op.buffer}[{cell}], not {op.tag}")
                    yield self._move(state, i, program, pc + 1)
        if self.design.places < 1000:
            for i, (_, pcs) in enumerate(state.at):
                if NOT_STARTED in pcs and self._has_place(state, self.wheres[i][0]):
                    yield self._move(state, i, pcs.index(NOT_STARTED), 0)

    def _settle(self, state: State) -> State:
        """Everything that only ever enables."""
        while (after := self._settle_once(state)) is not None:
            state = after
        return state

    def _settle_once(self, state: State) -> State | None:
        flags: dict[tuple[int, str], int] | None = None
        for i, (kernel, pcs) in enumerate(state.at):
            rank, kernels = self.wheres[i][0], self.streams[self.wheres[i]]
            if kernel == len(kernels):
                continue
            if all(pc == len(ops) for pc, ops in zip(pcs, kernels[kernel], strict=True)):
                fresh = (NOT_STARTED,) * len(kernels[kernel + 1]) if kernel + 1 < len(kernels) else ()
                return replace(state, at=(*state.at[:i], (kernel + 1, fresh), *state.at[i + 1 :]))
            if NOT_STARTED in pcs and self.design.places >= 1000:
                return self._move(state, i, pcs.index(NOT_STARTED), 0)
            for program, pc, ops in self._running(state, i):
                op, entry = ops[pc], (self.wheres[i], kernel, program)
                moved = self._move(state, i, program, pc + 1)
                if isinstance(op, Write) and op.rank == rank:
                    return self._arrive(moved, (*entry, op))
                if isinstance(op, Write):
                    return replace(moved, pending=state.pending | {(*entry, op)})
                if isinstance(op, Signal):
                    on_their_way = any(e[:3] == entry for e in state.pending)
                    if not (self.design.release and on_their_way):
                        others = (f for f in state.flags if f[0] != (op.rank, op.flag))
                        return replace(moved, flags=frozenset([*others, ((op.rank, op.flag), op.value)]))
                if isinstance(op, Wait):
                    flags = dict(state.flags) if flags is None else flags
                    if flags.get((rank, op.flag), 0) >= op.value:
                        return moved
        return None

    def _running(self, state: State, i: int) -> Iterator[tuple[int, int, Program]]:
        kernel, pcs = state.at[i]
        for program, pc in enumerate(pcs):
            ops = self.streams[self.wheres[i]][kernel][program]
            if NOT_STARTED < pc < len(ops):
                yield program, pc, ops

    def _has_place(self, state: State, rank: int) -> bool:
        taken = sum(
            len(list(self._running(state, i))) for i, (r, _) in enumerate(self.wheres) if r == rank
        )  # fmt: skip
        return taken < self.design.places

    @staticmethod
    def _move(state: State, i: int, program: int, pc: int) -> State:
        kernel, pcs = state.at[i]
        moved = (kernel, (*pcs[:program], pc, *pcs[program + 1 :]))
        return replace(state, at=(*state.at[:i], moved, *state.at[i + 1 :]))

    @staticmethod
    def _arrive(state: State, entry: tuple[Where, int, int, Write]) -> State:
        write = entry[3]
        memory = dict(state.memory)
        memory.update(((write.rank, write.buffer, cell), write.tag) for cell in write.cells)
        return replace(state, pending=state.pending - {entry}, memory=frozenset(memory.items()))


def in_a_row(*calls: int) -> tuple[tuple[int, str, int], ...]:
    """One call after the other on one stream."""
    return tuple((0, kind, call) for call in calls for kind in ("dispatch", "experts", "combine"))


def overlapped(*pairs: tuple[int, int]) -> tuple[tuple[int, str, int], ...]:
    """Prepare a, prepare b, finalize b, finalize a on one stream, pair after pair."""
    order: list[tuple[int, str, int]] = []
    for a, b in pairs:
        order += [(0, "dispatch", a), (0, "dispatch", b)]
        order += [(0, kind, call) for call in (b, a) for kind in ("experts", "combine")]
    return tuple(order)


TWO_RANKS = Design(ranks=2, calls=((0, 2, 2), (0, 1, 1), (0, 2, 2)), order=in_a_row(0, 1, 2))
THREE_RANKS = Design(ranks=3, calls=((0, 1, 1), (0, 2, 1)), order=in_a_row(0, 1))
MICRO_BATCHES = Design(
    ranks=2, calls=((0, 1, 1), (1, 2, 1), (0, 2, 1), (1, 1, 1)), order=overlapped((0, 1), (2, 3))
)  # fmt: skip
# Each micro-batch on a stream of its own, and room for the waiting programs of one kernel beside one that sends.
TWO_STREAMS = Design(
    ranks=2,
    calls=((0, 1, 1), (1, 1, 1)),
    order=tuple((call, kind, call) for call in (0, 1) for kind in ("dispatch", "experts", "combine")),
    places=2,
)


@pytest.mark.parametrize(
    "design",
    [
        pytest.param(TWO_RANKS, id="two ranks, steps of different sizes"),
        pytest.param(THREE_RANKS, id="three ranks, steps of different sizes"),
        pytest.param(
            replace(THREE_RANKS, calls=((0, 2, 1), (0, 1, 1))), id="three ranks, a smaller step after a larger"
        ),
        pytest.param(MICRO_BATCHES, id="two micro-batches on one stream"),
        pytest.param(TWO_STREAMS, id="two micro-batches on two streams, few places"),
        pytest.param(
            replace(MICRO_BATCHES, ranks=3, calls=((0, 1, 1), (1, 1, 1)), order=overlapped((0, 1))),
            id="two micro-batches, three ranks",
        ),
        pytest.param(replace(TWO_RANKS, places=3), id="more programs than places"),
    ],
)
def test_every_interleaving_ends_well(design: Design) -> None:
    assert Model(design).explore() > 100


@pytest.mark.parametrize(
    ("design", "what"),
    [
        pytest.param(replace(TWO_RANKS, release=False), "read", id="flags set without release"),
        pytest.param(replace(TWO_RANKS, dispatch_waits=False), "read", id="experts that do not wait for rows"),
        pytest.param(replace(TWO_RANKS, combine_waits=False), "read", id="additions that do not wait for rows"),
        pytest.param(replace(TWO_RANKS, partials_are="rows"), "read", id="one buffer for both ways"),
        pytest.param(
            replace(MICRO_BATCHES, calls=tuple((0, *sizes) for _, *sizes in MICRO_BATCHES.calls)),
            "read",
            id="one slot for two micro-batches",
        ),
        pytest.param(
            replace(THREE_RANKS, signals_last=False), "read", id="a flag set before the ids of other ranks are read"
        ),
        pytest.param(replace(TWO_STREAMS, places=1), "stuck", id="waiting programs that leave no room to send"),
    ],
)
def test_a_planted_fault_is_found(design: Design, what: str) -> None:
    with pytest.raises(ViolationError, match=what):
        Model(design).explore()

"""Who is alive and where it stands: every rank writes a beat into the store that its process group was made with.

A beat is a counter, not a time: whether a peer lives is told by the counter moving between two of our own readings,
so the clocks of different hosts never matter.
"""

import atexit
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from weakref import WeakSet

from torch.distributed import Store  # type: ignore[attr-defined]

PERIOD_S = 0.5
"""How often a rank writes its beat; also the shortest time between two readings that count as two."""

MISSED_BEATS_OF_THE_DEAD = 3
"""Readings in a row that found the same beat, before its rank counts as dead."""

_STORE_TIMEOUT = timedelta(seconds=5)


@dataclass(slots=True)
class Peer:
    """What the last reading said about another rank."""

    beat: int
    step: int
    phase: str
    gave_up_on: tuple[int, ...]
    raised: str = ""
    missed_beats: int = 0

    @property
    def is_dead(self) -> bool:
        return self.missed_beats >= MISSED_BEATS_OF_THE_DEAD


@dataclass(slots=True, weakref_slot=True, eq=False)
class Seat:
    """The place of this rank in one group. Its group sets the plain attributes, the thread reads them.

    Attributes:
        name: of the group in the store, the same on all of its ranks.
        step, phase: where this rank stands.
        waiting: it waits for others; only then does the thread read what they write.
        gave_up_on: the ranks that this one named as lost before it left.
        raised: the error with which this rank left a step, in one line.
        raised_at: the step that it had begun last when it raised last; -1: never.
        on_raised: called by the thread, while this rank waits, once a peer says that it raised.
        peers: by rank, those that have ever written a beat.
    """

    name: str
    rank: int
    size: int
    step: int = 0
    phase: str = "start"
    waiting: bool = False
    gave_up_on: tuple[int, ...] = ()
    raised: str = ""
    raised_at: int = -1
    on_raised: Callable[[], None] | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    beat: int = 0
    read_at: float = float("-inf")

    @property
    def waits_in_vain(self) -> bool:
        """A peer raised before it began the step that this rank is in, and this rank did not raise there too: what all
        refuse alike, all may go on after, and one of them later than the others."""
        raised = (peer for peer in self.peers.values() if peer.raised and peer.step != self.raised_at)
        return any(peer.step < self.step for peer in raised)


class Heartbeat:
    """The beats of this process in one store, written by one daemon thread over a connection of its own.

    Args:
        store: cloned, because a blocking `get` elsewhere in the process would hold up the beats on a shared connection.

    Attributes:
        store_is_lost: the store does not answer; nothing is written or read any more.
        linger_s: how long to hold up the end of this process, in seconds, for others to read what it wrote last.
    """

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(_STORE_TIMEOUT)
        self._seats: WeakSet[Seat] = WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.store_is_lost = False
        self.linger_s = 0.0
        self._thread = threading.Thread(target=self._run, name="vllm_moe_modular heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from the store into a dying interpreter aborts the process.
        atexit.register(self._close)

    def join(self, seat: Seat) -> None:
        """Write the first beat of `seat` and keep it beating for as long as the seat exists."""
        self.write(seat)
        with self._lock:
            self._seats.add(seat)

    def write(self, seat: Seat) -> None:
        """Write where `seat` stands, now."""
        with self._lock:
            seat.beat += 1
            line = json.dumps([seat.beat, seat.step, seat.phase, seat.gave_up_on, seat.raised])
            self._try(partial(self._store.set, _key(seat, seat.rank), line))

    def read(self, seat: Seat) -> None:
        """Bring `seat.peers` up to date, unless that was done less than a period ago."""
        with self._lock:
            if time.monotonic() - seat.read_at < PERIOD_S or self.store_is_lost:
                return
            seat.read_at = time.monotonic()
            for rank in range(seat.size):
                if rank != seat.rank:
                    self._try(partial(self._read_one, seat, rank))

    def _read_one(self, seat: Seat, rank: int) -> None:
        key = _key(seat, rank)
        if rank not in seat.peers and not self._store.check([key]):
            return
        beat, step, phase, gave_up_on, raised = json.loads(self._store.get(key))
        before = seat.peers.get(rank)
        missed = before.missed_beats + 1 if before is not None and before.beat == beat else 0
        seat.peers[rank] = Peer(beat, step, phase, tuple(gave_up_on), raised, missed)

    def _try(self, talk: Callable[[], None]) -> None:
        if self.store_is_lost:
            return
        try:
            talk()
        except RuntimeError:
            self.store_is_lost = True

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S) and not self.store_is_lost:
            with self._lock:
                seats = list(self._seats)
            for seat in seats:
                self.write(seat)
                if seat.waiting:
                    self.read(seat)
                    on_raised = seat.on_raised
                    if on_raised is not None and seat.waits_in_vain:
                        on_raised()

    def _close(self) -> None:
        time.sleep(self.linger_s)
        self._stop.set()
        self._thread.join(timeout=_STORE_TIMEOUT.total_seconds())


def _key(seat: Seat, rank: int) -> str:
    return f"vllm_moe_modular/heartbeat/{seat.name}/{rank}"


_heartbeats: dict[int, tuple[Store, Heartbeat]] = {}
_heartbeats_lock = threading.Lock()


def heartbeat_in(store: Store) -> Heartbeat:
    """The one heartbeat of this process in `store`."""
    with _heartbeats_lock:
        if id(store) not in _heartbeats:
            # The store is kept with it: an id is only unique among living objects.
            _heartbeats[id(store)] = (store, Heartbeat(store))
        return _heartbeats[id(store)][1]

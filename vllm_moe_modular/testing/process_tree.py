"""Finds and ends every process that a server started, also those that lost their parent. Linux: reads /proc."""

import os
import signal
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ORPHAN_S = 2.0  # how long children may take to end by themselves once their leader has
MARKER = "MOE_MODULAR_SERVER"  # environment variable that children inherit


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc; `started` tells a process from a later one that got the same id."""

    pid: int
    parent: int
    session: int
    started: int
    zombie: bool


def running() -> dict[int, Process]:
    """Every process that can be read now, by id; zombies included."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := _read(int(entry.name))) is not None:
            found[process.pid] = process
    return found


def _read(pid: int) -> Process | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:  # it ended between the listing and the reading
        return None
    state, parent, _group, session, *rest = stat[stat.rindex(")") + 2 :].split()
    return Process(pid, int(parent), int(session), started=int(rest[15]), zombie=state in "ZX")


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARKER}={mark}".encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def members(leader: int, mark: str, known: Set[Process] = frozenset()) -> set[Process]:
    """The living processes of one server: of the leader's session, or below it or a `known` one, or marked.

    Three ways because each has a hole: a child may open its own session, its parent may be gone, and a process
    that renames itself overwrites its environment.
    """
    alive = {pid: process for pid, process in running().items() if not process.zombie and pid != os.getpid()}
    still = {process.pid for process in known if alive.get(process.pid, process).started == process.started}
    mine = {p.pid for p in alive.values() if p.session == leader or p.pid == leader or _marked(p.pid, mark)}
    mine |= still & alive.keys()
    while below := {p.pid for p in alive.values() if p.parent in mine} - mine:
        mine |= below
    return {alive[pid] for pid in mine}


def end_all(leader: int, mark: str, *, known: Set[Process], polite_s: float, forced_s: float = 10.0) -> set[Process]:
    """SIGTERM to the leader, later SIGKILL to all that is left; returns what survived `forced_s` of that.

    Later is `polite_s`, or `ORPHAN_S` after the leader has ended if that is sooner.
    """
    known = known | members(leader, mark, known)
    _signal(leader, signal.SIGTERM)
    deadline = time.monotonic() + polite_s
    while (left := members(leader, mark, known)) and time.monotonic() < deadline:
        known |= left
        _reap(leader)
        if leader not in {process.pid for process in left}:
            deadline = min(deadline, time.monotonic() + ORPHAN_S)
        time.sleep(0.1)
    deadline = time.monotonic() + forced_s
    while (left := members(leader, mark, known)) and time.monotonic() < deadline:
        known |= left
        for process in left:
            _signal(process.pid, signal.SIGKILL)
        _reap(leader)
        time.sleep(0.1)
    return left


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pid: int) -> None:
    """Takes the exit status of a child that has ended, so that it does not stay behind as a zombie."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return

"""A torch.distributed process group whose failures have names.

Letters: W ranks of the group, N rows sent, M rows received.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_moe_modular.errors import RankLostError
from vllm_moe_modular.modular.heartbeat import MISSED_BEATS_OF_THE_DEAD, PERIOD_S, Peer, Seat, heartbeat_in

Wait = Callable[[], None]

_OUTSIDE = -1
"""In place of a rank of the group: a process that does not belong to it."""

_STEPS_PER_TAG_RANGE = 1 << 20
_TAG_RANGES = 1 << 10
"""Message tags are positive int32: 2**20 steps for each of 2**10 RankGroups over one process group."""

_JUDGE_S = (MISSED_BEATS_OF_THE_DEAD + 2) * PERIOD_S
"""How long to watch the beats, once a connection broke, for the rank whose beat has stopped."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One half of a point-to-point transfer that was started."""

    peer: int
    work: dist.Work
    incoming: bool


class RankGroup:
    """Collectives with a deadline and, when a rank misses it, an error that says which, at which step, in which phase.

    Every rank calls the same collectives in the same order, whatever it has to send. Each is one step. After a loss
    every further one is refused with the same error.

    CPU tensors travel point to point: it is known from whom nothing came, the deadline holds (a collective of gloo goes
    on in the background after its `wait` timed out, and keeps the process from ending), and a rank's own rows are
    copied once. CUDA tensors use the group's collectives; there the host waits, and so notices a loss, only where it
    needs numbers: in `exchange_counts`. Over gloo they go by way of the host, which waits in each step: for trying a
    part on fewer GPUs than ranks.

    Args:
        group: from `torch.distributed`.
        timeout_s: how long a rank may be missing from a step, in seconds.
        store: where the ranks met; carries the heartbeats that tell a dead rank from a late one. None: an error names
            only those from which nothing came.
        store_host: the global rank whose process serves the store; rank 0 by torch's convention.

    Attributes:
        process_group, timeout_s: as given.
        rank, size: of the group.
        global_ranks: by rank of the group.
    """

    _made_over: ClassVar[WeakKeyDictionary[dist.ProcessGroup, "itertools.count[int]"]] = WeakKeyDictionary()

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_s: float, store: Store | None = None, store_host: int = 0
    ) -> None:
        self.process_group = group
        self.timeout_s = timeout_s
        self._store_host = store_host
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.global_ranks = _global_ranks(group)
        self._moves_host_memory = _is_gloo(group)
        serial = next(self._made_over.setdefault(group, itertools.count()))
        self._first_tag = serial % _TAG_RANGES * _STEPS_PER_TAG_RANGE
        self._lost: RankLostError | None = None
        name = f"{group.group_name}/{'-'.join(map(str, self.global_ranks))}/{serial}"
        self._seat = Seat(name, self.rank, self.size)
        self._heartbeat = None if store is None or self.size == 1 else heartbeat_in(store)
        if self._heartbeat is not None:
            self._heartbeat.join(self._seat)

    def say_raised(self, error: Exception) -> None:
        """Tell the others that this rank leaves a step with `error`, so that they do not wait for it until the timeout.

        Whoever waits in a step that this rank has not begun raises RankLostError with this error's text.
        """
        if self._heartbeat is None or self._lost is not None:
            return
        self._seat.raised_at = self._seat.step
        self._seat.raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._heartbeat.write(self._seat)

    @property
    def step(self) -> int:
        """How many collectives this rank has begun."""
        return self._seat.step

    def exchange_counts(self, counts_W: torch.Tensor, *, phase: str) -> tuple[list[int], list[int]]:
        """Tell every rank one number and wait for the one it has for us.

        Args:
            counts_W: [W], int32, on any device; element r is for rank r.
            phase: names the step in errors.

        Returns:
            What was sent and what was received, by rank, on the host.

        Raises:
            RankLostError: a rank did not take part in time.
        """
        both_2W = counts_W.new_empty((2, self.size))
        both_2W[0] = counts_W
        ones = [1] * self.size
        self.all_to_all(both_2W[1], both_2W[0], out_rows=ones, in_rows=ones, phase=phase)()
        sent, received = self._on_host(both_2W).tolist()
        return sent, received

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, *, out_rows: Sequence[int], in_rows: Sequence[int], phase: str
    ) -> Wait:
        """Start a ragged all-to-all of rows.

        Args:
            out: [M, ...], contiguous; rows from rank 0 first. Left alone until the returned function was called.
            x: [N, ...], contiguous, same dtype and row shape; rows for rank 0 first. Not written to until then.
            out_rows, in_rows: [W], how many rows of each come from, and go to, every rank. What a pair of ranks say of
                each other must agree. 0 for this rank itself leaves its own rows out.
            phase: names the step in errors.

        Returns:
            A function that waits: the host for CPU tensors, the current stream for CUDA tensors. Call it once. Raises
            RankLostError.

        Raises:
            RankLostError: a rank was lost.
        """
        self._begin(phase)
        if out.device.type == "cpu":
            return self._point_to_point(torch.split(out, list(out_rows)), torch.split(x, list(in_rows)))
        if self._moves_host_memory:
            host = torch.empty(out.shape, dtype=out.dtype)
            parts = torch.split(host, list(out_rows)), torch.split(x.cpu(), list(in_rows))
            return _then_copy(self._point_to_point(*parts), host, out)
        work = dist.all_to_all_single(
            _bytes(out), _bytes(x), list(out_rows), list(in_rows), group=self.process_group, async_op=True
        )
        return self._on_stream(work)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, phase: str) -> Wait:
        """Start gathering a block of the same shape from every rank.

        Args:
            out: [W, ...], contiguous; the block of rank 0 first. Left alone until the returned function was called.
            x: [...], contiguous, same dtype. Not written to until then.
            phase: names the step in errors.

        Returns:
            A function that waits, as that of `all_to_all`.

        Raises:
            RankLostError: a rank was lost.
        """
        self._begin(phase)
        if out.device.type == "cpu":
            return self._point_to_point(out.unbind(0), [x] * self.size)
        if self._moves_host_memory:
            host = torch.empty(out.shape, dtype=out.dtype)
            return _then_copy(self._point_to_point(host.unbind(0), [x.cpu()] * self.size), host, out)
        work = dist.all_gather_into_tensor(
            _bytes(out).view(-1), _bytes(x).view(-1), group=self.process_group, async_op=True
        )
        return self._on_stream(work)

    def _begin(self, phase: str) -> None:
        if self._lost is not None:
            raise self._loss_again()
        self._seat.phase = phase
        self._seat.raised = ""
        self._seat.step += 1

    @torch.no_grad()  # an error of autograd between two messages would leave the others waiting
    def _point_to_point(self, out: Sequence[torch.Tensor], x: Sequence[torch.Tensor]) -> Wait:
        """Start one message to and one from every peer; no message where there are no rows, which both sides know."""
        step, phase = self._seat.step, self._seat.phase
        tag = self._first_tag + step % _STEPS_PER_TAG_RANGE
        messages: list[_Message] = []
        peer = self.rank
        try:
            # Each rank begins with its own neighbour, so that no rank is flooded first by all others.
            for distance in range(1, self.size):
                peer = (self.rank - distance) % self.size
                if out[peer].numel():
                    messages.append(_Message(peer, self.process_group.recv([_bytes(out[peer])], peer, tag), True))
            for distance in range(1, self.size):
                peer = (self.rank + distance) % self.size
                if x[peer].numel():
                    messages.append(_Message(peer, self.process_group.send([_bytes(x[peer])], peer, tag), False))
        except RuntimeError as error:
            self._lose(step, phase, {peer}, cause=error, timed_out=False)
        out[self.rank].copy_(x[self.rank])
        return lambda: self._finish(step, phase, messages)

    def _on_stream(self, work: dist.Work | None) -> Wait:
        assert work is not None, "an asynchronous collective of a group that this rank belongs to returns its work"
        step, phase = self._seat.step, self._seat.phase

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                self._lose(step, phase, set(), cause=error, timed_out=False)

        return wait

    def _finish(self, step: int, phase: str, messages: Sequence[_Message]) -> None:
        if self._lost is not None:
            raise self._loss_again()
        deadline = time.monotonic() + self.timeout_s
        self._seat.on_raised = self._interrupt
        self._seat.waiting = True
        try:
            for number, message in enumerate(messages):
                try:
                    _wait_until(message.work, deadline)
                except RuntimeError as error:
                    timed_out = time.monotonic() >= deadline
                    rest = [m for m in messages[number + 1 :] if m.incoming and not _has_arrived(m.work)]
                    silent = {message.peer, *(m.peer for m in rest)} if timed_out else {message.peer}
                    self._lose(step, phase, silent, cause=error, timed_out=timed_out)
        finally:
            self._seat.waiting = False
            self._seat.on_raised = None

    def _interrupt(self) -> None:
        """End this rank's wait: once one message of gloo timed out, every other one of the group fails at once.

        The loss of the group is certain by then, and the wait itself cannot be cut into pieces for the same reason.
        Every peer is tried: over a connection that a peer has closed already nothing can time out. Runs in the thread
        of the heartbeat, which nothing may end.
        """
        unused = self._first_tag
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    message = self.process_group.recv([torch.empty(1, dtype=torch.uint8)], peer, unused)
                    message.wait(timedelta(milliseconds=1))

    def _loss_again(self) -> RankLostError:
        """The error of the loss, to be raised anew."""
        assert self._lost is not None, "a rank was lost"
        return RankLostError(str(self._lost), rank=self._lost.rank, step=self._lost.step, phase=self._lost.phase)

    def _on_host(self, t: torch.Tensor) -> torch.Tensor:
        """`t` on the host, within the deadline."""
        if t.device.type == "cpu":
            return t
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        deadline = time.monotonic() + self.timeout_s
        self._seat.waiting = True
        try:
            while not copied.query():  # type: ignore[no-untyped-call]
                if time.monotonic() >= deadline or self._seat.waits_in_vain:
                    self._lose(self._seat.step, self._seat.phase, set(), cause=None, timed_out=True)
                time.sleep(0)  # lets the heartbeat thread have the interpreter
        finally:
            self._seat.waiting = False
        return host

    def _lose(self, step: int, phase: str, silent: set[int], *, cause: Exception | None, timed_out: bool) -> NoReturn:
        """Find out who is missing, tell the others, and raise."""
        why = self._who_is_missing(step, silent, timed_out=timed_out)
        self._seat.gave_up_on = tuple(rank for rank in sorted(why) if rank != _OUTSIDE)
        what = "; ".join(why.values()) or "no rank of this group is known to be missing"
        detail = f" ({str(cause).splitlines()[0]})" if cause is not None and not why else ""
        self._lost = RankLostError(
            f"rank {self.rank} of {self.size}, step {step}, phase {phase!r}: {what}{detail}. "
            f"A group that lost a rank cannot go on: restart all of its ranks. A rank may be missing for "
            f"{self.timeout_s:g} s (VLLM_MOE_MODULAR_TIMEOUT_S); raise that if a step may take longer",
            rank=min(self._seat.gave_up_on, default=None),
            step=step,
            phase=phase,
        )
        if self._heartbeat is not None:
            self._heartbeat.write(self._seat)
            if self.global_ranks[self.rank] == self._store_host:
                # With this process the store goes too, and with it what the others need to name the right rank.
                self._heartbeat.linger_s = 2 * PERIOD_S
        raise self._lost from cause

    def _who_is_missing(self, step: int, silent: set[int], *, timed_out: bool) -> dict[int, str]:
        """Why each missing rank is thought to be missing, one clause each."""
        if self._heartbeat is None:
            return {rank: f"nothing came from {self._name(rank)}" for rank in sorted(silent)}
        deadline = time.monotonic() + (PERIOD_S if timed_out else _JUDGE_S)
        while True:
            self._heartbeat.read(self._seat)
            why = self._judge(step, timed_out=timed_out)
            if why or time.monotonic() >= deadline:
                break
            time.sleep(PERIOD_S / 5)
        return why or {
            rank: f"nothing came from {self._name(rank)}, which is alive and has not said that it left"
            for rank in sorted(silent)
        }

    def _judge(self, step: int, *, timed_out: bool) -> dict[int, str]:
        peers = self._seat.peers
        why: dict[int, str] = {}
        for rank, peer in sorted(peers.items()):
            for lost in peer.gave_up_on:
                who = "this rank, which came too late" if lost == self.rank else self._name(lost)
                why[lost] = f"{self._name(rank)} gave up at {_place(peer)} waiting for {who}"
        for rank, peer in sorted(peers.items()):
            if peer.raised:
                why[rank] = f"{self._name(rank)} raised {peer.raised} after {_place(peer)}"
        dead = [r for r, p in sorted(peers.items()) if p.is_dead and not p.gave_up_on and not p.raised]
        for rank in dead:
            why[rank] = f"{self._name(rank)} is dead: its heartbeat stopped, last at {_place(peers[rank])}"
        if why:
            return why
        assert self._heartbeat is not None, "judged by its beats"
        if self._heartbeat.store_is_lost:
            host = self._store_host
            rank = self.global_ranks.index(host) if host in self.global_ranks else _OUTSIDE
            name = f"global rank {host}" if rank == _OUTSIDE else self._name(rank)
            return {rank: f"the store does not answer, so {name}, whose process serves it, is dead"}
        if timed_out:
            for rank in range(self.size):
                if rank == self.rank:
                    continue
                if rank not in peers:
                    why[rank] = f"{self._name(rank)} never joined the group"
                elif peers[rank].step < step:
                    why[rank] = f"{self._name(rank)} is alive but stalled at {_place(peers[rank])}"
        return why

    def _name(self, rank: int) -> str:
        world = self.global_ranks[rank]
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"


def _place(peer: Peer) -> str:
    return f"step {peer.step}, phase {peer.phase!r}"


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The same memory as rows of bytes: gloo does not know every dtype, and a copy needs none."""
    return (t.unsqueeze(-1) if t.dim() == 1 else t).view(torch.uint8)


def _wait_until(work: dist.Work, deadline: float) -> None:
    # Whole milliseconds, rounded up so that a wait in vain ends after the deadline; 0 would mean for ever.
    work.wait(timedelta(milliseconds=max(1, math.ceil((deadline - time.monotonic()) * 1e3))))


def _has_arrived(work: dist.Work) -> bool:
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def _then_copy(wait: Wait, host: torch.Tensor, out: torch.Tensor) -> Wait:
    def finish() -> None:
        wait()
        out.copy_(host)

    return finish


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Of one backend, which moves host memory; a group that torch.distributed did not register counts as another."""
    try:
        return bool(dist.get_backend(group) == "gloo")
    except (KeyError, ValueError, RuntimeError):
        return False


def _global_ranks(group: dist.ProcessGroup) -> list[int]:
    """By rank of the group; a group that torch.distributed did not register counts its own."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return list(range(group.size()))

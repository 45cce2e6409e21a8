"""Real ranks for tests: processes on this machine that met over a TCPStore on 127.0.0.1.

    def add_up(here: Here, x: float) -> float:  # at module level, so that the ranks can import it
        t = torch.tensor(x * here.rank)
        dist.all_reduce(t)
        return t.item()

    run_ranks(add_up, 2, 1.5, timeout_s=60)  # [1.5, 1.5]

Importing this does not import torch, so that a rank can set the environment before it does.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vllm_moe_modular.errors import MoEModularError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

START_S = 120.0
"""How long the ranks may take to import torch and to meet, on a machine with other things to do."""

NCCL_ON_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own switch: ranks may share a device."""

_OTHERS_S = 2.0
"""How long the other ranks may go on once one has failed, so that their errors are reported too."""


class RankFailedError(MoEModularError):
    """A rank raised, died or took too long; the message has every rank that did, with its traceback."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a function that runs on a rank is given first.

    Attributes:
        rank, size: of the default process group.
        group: all ranks.
        store: that they met over; served by rank 0.
        device: of this rank.
    """

    rank: int
    size: int
    group: "ProcessGroup"
    store: "Store"
    device: "torch.device"


Function = Callable[..., Any]
"""fn(here, *args), importable by name in another process; arguments and result can be pickled."""


class Ranks:
    """Ranks that stay up between calls, because each costs seconds to start. A context manager.

    After a call that failed, or that a rank was to die in, the next call starts new ones.

    Args:
        size: how many.
        backend: of torch.distributed.
        device: "cpu" or "cuda": of rank r the CUDA device r, modulo how many there are; None: as the backend has it.
            NCCL wants a device for each rank, gloo lets ranks share one.
        poison: ranks run with `poisoned_empty`.
    """

    def __init__(self, size: int, *, backend: str = "gloo", device: str | None = None, poison: bool = True) -> None:
        self._size = size
        self._backend = backend
        self._device = device or ("cuda" if backend == "nccl" else "cpu")
        self._poison = poison
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, fn: Function, *args: Any, timeout_s: float, dying: Collection[int] = (), lingering: Collection[int] = ()
    ) -> list[Any]:
        """Call `fn(here, *args)` on every rank and return the results by rank.

        Args:
            timeout_s: for the call, not for starting the ranks; then all of them are killed.
            dying: ranks that are expected to end their process; their result is None.
            lingering: ranks that are not waited for and killed at the end; their result is None.

        Raises:
            RankFailedError: a rank raised, died unexpectedly, or was not done in time.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        try:
            results = self._collect(set(range(self._size)) - set(lingering), timeout_s=timeout_s, dying=dying)
        except BaseException:
            self.close()
            raise
        if dying or lingering:
            self.close()
        return [results.get(rank) for rank in range(self._size)]

    def close(self) -> None:
        """End the ranks, by force."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self._size, self._backend, self._device, self._poison), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            port = self._collect({0}, timeout_s=START_S)[0]
            for pipe in self._pipes[1:]:
                pipe.send_bytes(pickle.dumps(port))
            self._collect(set(range(self._size)), timeout_s=START_S)
        except BaseException:
            self.close()
            raise

    def _collect(self, ranks: set[int], *, timeout_s: float, dying: Collection[int] = ()) -> dict[int, Any]:
        """One answer from each of `ranks`."""
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=remaining):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                rank = waiting.pop(pipe)
                try:
                    result, failure = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    result, failure = None, self._death_of(rank)
                    failure = None if rank in dying else failure
                results[rank] = result
                if failure is not None:
                    failures.append(f"rank {rank} {failure}")
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
        if waiting and not failures:
            failures.append(f"ranks {sorted(waiting.values())} were not done within {timeout_s:g} s")
        if failures:
            raise RankFailedError("\n".join(failures))
        return results

    def _death_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"ended ({how}) before it answered"


def run_ranks(
    fn: Function,
    world_size: int,
    *args: Any,
    timeout_s: float,
    backend: str = "gloo",
    device: str | None = None,
    dying: Collection[int] = (),
    lingering: Collection[int] = (),
) -> list[Any]:
    """Call `fn(here, *args)` on `world_size` new ranks and return the results by rank; see `Ranks.run`."""
    with Ranks(world_size, backend=backend, device=device) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s, dying=dying, lingering=lingering)


def cuda_ranks(size: int, *, poison: bool = True) -> Ranks:
    """Ranks on CUDA devices: over NCCL with one for each rank, else over gloo on shared ones.

    On a shared device the kernels of two ranks take turns, so that a wait for a peer lasts milliseconds. NCCL from 2.30
    on works there too, where `NCCL_MULTI_RANK_GPU_ENABLE=1` says so, and is taken then.
    """
    over_nccl = not shares_devices(size) or os.environ.get(NCCL_ON_SHARED) == "1"
    return Ranks(size, backend="nccl" if over_nccl else "gloo", device="cuda", poison=poison)


def shares_devices(size: int) -> bool:
    """Whether there are fewer CUDA devices than ranks."""
    import torch

    return torch.cuda.device_count() < size


def _serve(pipe: Connection, rank: int, size: int, backend: str, device: str, poison: bool) -> None:
    """The life of a rank: meet the others, then answer calls until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if device == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # symmetric memory of ranks on one device
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    from vllm_moe_modular.testing.poison import poisoned_empty

    here = _meet(pipe, rank, size, backend, device)
    _answer(pipe, lambda: None)
    with poisoned_empty() if poison else nullcontext():
        while True:
            try:
                call = pipe.recv_bytes()
            except EOFError:
                os._exit(0)  # whoever started us is gone: nobody is left to tidy up for
            _answer(pipe, lambda call=call: _call(here, call))  # type: ignore[misc]


def _call(here: Here, call: bytes) -> Any:
    fn, args = pickle.loads(call)
    return fn(here, *args)


def _answer(pipe: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((work(), None))
    except Exception:
        answer = pickle.dumps((None, f"raised:\n{traceback.format_exc()}"))
    pipe.send_bytes(answer)


def _meet(pipe: Connection, rank: int, size: int, backend: str, device_kind: str) -> Here:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    device = torch.device(device_kind)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=START_S)
    if rank == 0:
        # Port 0: the system gives a free one, so that there is no race for it.
        store = TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        _answer(pipe, lambda: store.port)
    else:
        port = pickle.loads(pipe.recv_bytes())
        store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None, "it was just initialised"
    return Here(rank, size, group, store, device)

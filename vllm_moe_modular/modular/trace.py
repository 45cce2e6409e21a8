"""Looks at one step in many: where the rows went, which experts had them, where the time went.

A step is never held up: on a GPU, times are CUDA events and counts are copied to the host behind the work that makes
them; both are picked up at a later sample, once they are there. Lines are written by a thread.

Letters: T tokens, R rows, K top-k, E local experts, W ranks.
"""

import atexit
import json
import logging
import queue
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from vllm_moe_modular.modular.kernel import Mark, Observe, unobserved
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows
from vllm_moe_modular.modular.traffic import Traffic

FORMAT = 1
"""Of the files; their first line says it."""

PHASES = {
    "prepare": "prepare",
    "experts": "experts",
    "send home": "finalize",
    "meanwhile": "meanwhile",
    "finalize": "finalize",
}
"""By phase of a kernel's call, what it counts as. Finalize has two pieces around the shared experts, "meanwhile"."""

_STOP = None
logger = logging.getLogger("vllm.moe_modular")


class Tracer:
    """Writes a file of one rank: a line for the run, one for each layer, one for each sampled call of a layer.

    All layers sample the same steps, on every rank: each counts its own calls, and a step calls each once. The rounds
    of a step are summed. A replay of a CUDA graph runs no Python and is not sampled.

    Args:
        file: is replaced.
        rank, size: of the expert-parallel group.
        every: one call in how many is sampled.
    """

    def __init__(self, file: Path, *, rank: int, size: int, every: int) -> None:
        self.every = every
        self._layers = 0
        self.started = time.monotonic()
        self._has_ended = False
        self._pending: deque[_Sample] = deque()
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        run = {"format": FORMAT, "rank": rank, "size": size, "every": every, "started": time.time()}
        self._lines.put({"kind": "run", **run})
        self._thread = threading.Thread(target=self._write, args=(file,), name="vllm_moe_modular trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def observe(self, name: str, *, all2all: str, experts: str, num_experts: int, traffic: Traffic | None) -> Observe:
        """What a layer's kernel is given to be looked at.

        Args:
            name: of the layer.
            all2all, experts: names of its parts.
            num_experts: E, the most that any rank holds.
            traffic: what its all-to-all counts; None: nothing.
        """
        layer, self._layers = self._layers, self._layers + 1
        told = {"layer": layer, "name": name, "all2all": all2all, "experts": experts, "num_experts": num_experts}
        self._lines.put({"kind": "layer", **told})
        calls = 0

        def begin(x_TH: torch.Tensor) -> Mark:
            nonlocal calls
            step, calls = calls, calls + 1
            if step % self.every or self._has_ended or (x_TH.is_cuda and torch.cuda.is_current_stream_capturing()):
                return unobserved
            return _Sample(self, layer=layer, step=step, num_experts=num_experts, traffic=traffic, x_TH=x_TH)

        return begin

    def take(self, sample: "_Sample") -> None:
        """A sampled call is over; of those before it, what the device is done with is written."""
        with self._lock:
            self._pending.append(sample)
            self._pass_on()

    def _pass_on(self) -> None:
        while self._pending and self._pending[0].is_there:
            sample = self._pending.popleft()
            self._lines.put(sample.line())

    def close(self) -> None:
        """Write what is there; what the device still works at is left out."""
        atexit.unregister(self.close)
        with self._lock:
            self._pass_on()
        self._lines.put(_STOP)
        self._thread.join(timeout=5.0)

    def _write(self, file: Path) -> None:
        try:
            with file.open("w", encoding="utf-8") as out:
                while (line := self._lines.get()) is not _STOP:
                    out.write(json.dumps(line, separators=(",", ":")) + "\n")
                    out.flush()
        except OSError as error:
            self._has_ended = True
            logger.warning("moe_modular: the trace ends here, %s cannot be written: %s", file, error.strerror)


class _Sample:
    """One call of one layer with all its rounds, and the `Mark` of it."""

    def __init__(
        self, tracer: Tracer, *, layer: int, step: int, num_experts: int, traffic: Traffic | None, x_TH: torch.Tensor
    ) -> None:
        self._tracer = tracer
        self._layer, self._step, self._tokens = layer, step, x_TH.shape[0]
        self._at_s = time.monotonic() - tracer.started
        self._num_experts = num_experts
        self._on_gpu = x_TH.is_cuda
        self._traffic = traffic
        self._before = None if traffic is None else (list(traffic.rows_sent), list(traffic.rows_received))
        self._moved: tuple[list[int], list[int]] | None = None
        self._expert_tokens: list[torch.Tensor] = []  # by round
        self._phases: list[str] = []
        self._moments = [self._now()]

    def __call__(self, phase: str, rows: Rows | None = None) -> None:
        if phase == "call":
            self._tracer.take(self)
            return
        self._moments.append(self._now())
        self._phases.append(phase)
        if rows is not None:
            self._expert_tokens.append(self._on_its_way_to_the_host(expert_tokens(rows, self._num_experts)))
            if self._traffic is not None and self._before is not None:
                sent, received = self._before
                self._moved = _grown(self._traffic.rows_sent, sent), _grown(self._traffic.rows_received, received)
            self._moments.append(self._now())
            self._phases.append("looking")

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _on_its_way_to_the_host(self, counts: torch.Tensor) -> torch.Tensor:
        if not self._on_gpu:
            return counts
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        return host.copy_(counts, non_blocking=True)

    @property
    def is_there(self) -> bool:
        """The device is done with it; asked without waiting."""
        return not self._on_gpu or bool(self._moments[-1].query())

    def line(self) -> dict[str, Any]:
        """What is written of it, once it is there."""
        ms = dict.fromkeys(PHASES.values(), 0.0)
        for phase, start, end in zip(self._phases, self._moments, self._moments[1:], strict=False):
            if phase in PHASES:
                ms[PHASES[phase]] += start.elapsed_time(end) if self._on_gpu else 1e3 * (end - start)
        line: dict[str, Any] = {
            "kind": "sample",
            "layer": self._layer,
            "step": self._step,
            "at_s": round(self._at_s, 3),
        }
        line |= {"tokens": self._tokens, "ms": {phase: round(took, 4) for phase, took in ms.items()}}
        if self._expert_tokens:
            line["expert_tokens"] = torch.stack(self._expert_tokens).sum(dim=0).tolist()
        if self._moved is not None:
            line["rows_sent"], line["rows_received"] = self._moved
        return line


def _grown(now: list[int], before: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def expert_tokens(rows: Rows, num_experts: int) -> torch.Tensor:
    """[E], int32: how many times each local expert runs. No synchronisation."""
    if isinstance(rows, BatchedRows):
        return rows.expert_num_tokens.clone()  # the part may reuse the memory
    ids = rows.topk_ids.flatten().long()
    bins = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))[:num_experts]

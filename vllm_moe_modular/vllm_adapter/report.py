"""What ran, for tools that look from outside: two files per rank in the trace folder.

`rank{N}.json` holds the parts of each layer and the rows moved since start-up; `rank{N}.jsonl` the sampled steps.
"""

import atexit
import json
import os
import threading
from pathlib import Path
from typing import Any

from vllm_moe_modular.modular.trace import Tracer
from vllm_moe_modular.modular.two_kernels import Kernel

WRITE_EVERY_S = 0.5


class Report:
    """Keeps `rank{N}.json` up to date: which parts each layer runs on, and how many rows went where.

    A thread of its own looks at the counters that the all-to-alls keep anyway, so a step costs nothing; the steps that
    are sampled are another's, see `Tracer`.

    Args:
        folder: where to; it exists.
        rank, size: of this process in the expert-parallel group, and of that group.
        process: among all processes of the server; pipeline stages have expert-parallel groups of their own.
        every: one step in how many is sampled.
    """

    def __init__(self, folder: Path, *, rank: int, size: int, process: int, every: int) -> None:
        self._tracer = Tracer(folder / f"rank{process}.jsonl", rank=rank, size=size, every=every)
        self._file = folder / f"rank{process}.json"
        self._rank = rank
        self._layers: list[dict[str, str]] = []
        self._all2alls: list[Any] = []
        self._written: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm_moe_modular report", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add_layer(self, name: str, all2all: str, experts: str, kernel: Kernel, *, num_experts: int) -> None:
        """A layer was swapped, and runs on `kernel`; `num_experts`: the most of them that any rank holds."""
        self._layers.append({"name": name, "all2all": all2all, "experts": experts})
        prepare_finalize = kernel.prepare_finalize
        kernel.observe = self._tracer.observe(
            name, all2all=all2all, experts=experts, num_experts=num_experts, traffic=prepare_finalize.traffic
        )
        if not any(prepare_finalize is known for known in self._all2alls):
            self._all2alls.append(prepare_finalize)

    def close(self) -> None:
        """Write for the last time."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._write()
        self._tracer.close()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_EVERY_S):
            self._write()

    def _write(self) -> None:
        """Whole or not at all, and only where something changed."""
        traffic = [a.traffic for a in list(self._all2alls) if a.traffic is not None]
        record = {
            "rank": self._rank,
            "layers": list(self._layers),
            "rows_sent": _sums([t.rows_sent for t in traffic]),
            "rows_received": _sums([t.rows_received for t in traffic]),
            "steps": sum(t.steps for t in traffic),
        }
        if record == self._written:
            return
        self._written = record
        part = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self._file)


def _sums(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)] if rows else []

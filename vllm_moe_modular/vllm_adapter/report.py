"""What ran, for tools that look from outside: one small JSON file per rank in the trace folder."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITE_EVERY_S = 0.5


@dataclass(slots=True)
class Report:
    """Writes `rank{N}.json`: which parts each layer runs on, and how many rows went where.

    Attributes:
        folder: where to; made if missing.
        rank: of this process in the expert-parallel group.
    """

    folder: Path
    rank: int
    layers: list[dict[str, str]] = field(default_factory=list)
    _transports: list[Any] = field(default_factory=list)
    _written_s: float = 0.0

    def add_layer(self, name: str, all2all: str, experts: str, prepare_finalize: Any) -> None:
        """A layer was swapped; `prepare_finalize` is what counts its rows."""
        self.layers.append({"name": name, "all2all": all2all, "experts": experts})
        if not any(prepare_finalize is t for t in self._transports):
            self._transports.append(prepare_finalize)

    def tick(self) -> None:
        """Write, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._written_s >= WRITE_EVERY_S:
            self._written_s = now
            self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        traffic = [t.traffic for t in self._transports]
        record = {
            "rank": self.rank,
            "layers": self.layers,
            "rows_sent": _sums([t.rows_sent for t in traffic]),
            "rows_received": _sums([t.rows_received for t in traffic]),
            "steps": sum(t.steps for t in traffic),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".rank{self.rank}.json.{os.getpid()}"
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self.folder / f"rank{self.rank}.json")


def _sums(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)] if rows else []

"""Traces as a server of two ranks would have written them."""

import json
from pathlib import Path
from typing import Any

LAYERS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def write(folder: Path, rank: int, *, steps: int = 3, **run: Any) -> Path:
    """A trace of two layers with two experts on each of two ranks; rank 0 has three times the work."""
    told: list[dict[str, Any]] = [
        {"kind": "run", "format": 1, "rank": rank, "size": 2, "every": 64, "started": 1000.0 + rank, **run}
    ]
    for layer, name in enumerate(LAYERS):
        told.append(
            {"kind": "layer", "layer": layer, "name": name, "all2all": "torch", "experts": "torch", "num_experts": 2}
        )
    for step in range(steps):
        for layer in range(2):
            told.append(
                {
                    "kind": "sample", "layer": layer, "step": 64 * step, "at_s": step + 0.5, "tokens": 4,
                    "ms": {"prepare": 1.0, "experts": 2.0 + rank, "finalize": 0.5, "meanwhile": 0.0},
                    "expert_tokens": [9, 3] if rank == 0 else [4, 0], "rows_sent": [4, 2], "rows_received": [4, 2],
                }
            )  # fmt: skip
    file = folder / f"rank{rank}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in told))
    return file

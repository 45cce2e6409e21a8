"""Reads the `rank{N}.jsonl` that a server's ranks wrote, `modular/trace.py` says how. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_moe_modular.errors import MoEModularError

FORMAT = 1
PHASES = ("prepare", "experts", "finalize", "meanwhile")

_SAME_START_S = 600.0
"""How far apart the ranks of one server may begin to trace, clocks of several hosts included."""


class TraceError(MoEModularError):
    """A trace folder holds nothing that can be drawn; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, by what it runs on."""

    name: str
    all2all: str
    experts: str
    num_experts: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of one layer.

    Attributes:
        at_s: seconds since the rank began to trace.
        tokens: of this rank.
        ms: by phase, milliseconds.
        expert_tokens: [E], how many times each expert of this rank ran.
        rows_sent, rows_received: [W]; None where the all-to-all does not count them.
    """

    layer: str
    step: int
    at_s: float
    tokens: int
    ms: Mapping[str, float]
    expert_tokens: tuple[int, ...]
    rows_sent: tuple[int, ...] | None
    rows_received: tuple[int, ...] | None


@dataclass(slots=True)
class RankTrace:
    """One file."""

    file: Path
    rank: int
    size: int
    every: int
    started: float
    layers: dict[int, Layer] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


def read_traces(folder: Path) -> list[RankTrace]:
    """All files of a folder, by rank.

    Raises:
        TraceError: there are none, they are of different runs, one is not a trace, or nothing was sampled yet.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder} is not a folder; name the one that VLLM_MOE_MODULAR_TRACE named")
    files = sorted(folder.glob("rank*.jsonl"))
    traces = [trace for file in files if (trace := _read(file)) is not None]
    if not traces:
        raise TraceError(
            f"{folder} holds no traces (rank0.jsonl ...); "
            f"serve with VLLM_MOE_MODULAR=1 VLLM_MOE_MODULAR_TRACE={folder} and send requests"
        )
    _require_one_run(traces)
    if not any(trace.samples for trace in traces):
        raise TraceError(
            f"{folder}: no step was sampled yet, one in {traces[0].every} is; send more requests, or serve with "
            "VLLM_MOE_MODULAR_TRACE_EVERY=1. Steps that are replayed from a CUDA graph are never sampled: pass "
            "--enforce-eager to see them"
        )
    return sorted(traces, key=lambda trace: (trace.rank, trace.file.name))


def _read(file: Path) -> RankTrace | None:
    """None where a process was killed before it had written its first line."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from error
    trace: RankTrace | None = None
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut off by a kill
        try:
            told = json.loads(line)
            trace = _take(told, trace, file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"{file}, line {number} is not of a trace ({type(error).__name__}: {error}); "
                "move files of other programs out of the folder"
            ) from error
    return trace


def _take(told: dict[str, Any], trace: RankTrace | None, file: Path) -> RankTrace:
    if trace is None:
        if told["kind"] != "run":
            raise ValueError("the first line does not say what run it is")
        if told["format"] != FORMAT:
            raise TraceError(
                f"{file} has format {told['format']}, this release reads {FORMAT}; use the release that wrote it"
            )
        return RankTrace(file, int(told["rank"]), int(told["size"]), int(told["every"]), float(told["started"]))
    if told["kind"] == "layer":
        trace.layers[told["layer"]] = Layer(
            told["name"], told["all2all"], told["experts"], num_experts=int(told["num_experts"])
        )
    if told["kind"] == "sample":
        trace.samples.append(
            Sample(
                layer=trace.layers[told["layer"]].name,
                step=int(told["step"]),
                at_s=float(told["at_s"]),
                tokens=int(told["tokens"]),
                ms={phase: float(told["ms"][phase]) for phase in PHASES},
                expert_tokens=tuple(told.get("expert_tokens", ())),
                rows_sent=tuple(told["rows_sent"]) if "rows_sent" in told else None,
                rows_received=tuple(told["rows_received"]) if "rows_received" in told else None,
            )
        )
    return trace


def _require_one_run(traces: list[RankTrace]) -> None:
    first = max(traces, key=lambda trace: trace.started)
    for trace in traces:
        if (trace.size, trace.every) != (first.size, first.every):
            why = f"{trace.file.name} is of {trace.size} ranks and 1 step in {trace.every}, "
            why += f"{first.file.name} of {first.size} and 1 in {first.every}"
        elif first.started - trace.started > _SAME_START_S:
            why = f"{trace.file.name} was begun {(first.started - trace.started) / 60:.0f} minutes before "
            why += first.file.name
        else:
            continue
        raise TraceError(
            f"{trace.file.parent} holds traces of different runs: {why}; give each run a folder of its own"
        )

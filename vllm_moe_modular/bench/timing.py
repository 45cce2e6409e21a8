"""Timing in CUDA graphs: all candidates of one point on the same inputs, replayed in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.version import __version__

Calls = Sequence[Callable[[], object]]
"""One candidate on each of several inputs."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    median_us: float
    p20_us: float
    p80_us: float


def require_cuda(command: str) -> None:
    """Raises:
    MoEModularError: there is no GPU to measure.
    """
    if not torch.cuda.is_available():
        raise MoEModularError(f"{command} measures a CUDA GPU, and torch sees none here; run it where there is one")


def captured(calls: Calls) -> torch.cuda.CUDAGraph:
    """All calls one after the other in one CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_in_turns(graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, Timing]:
    """Replay the graphs in turns, so that clocks and temperature are the same for all of them; per call.

    Timed one candidate after the other, the first one runs on a cool chip: up to 15 % faster on an H200. Each round
    begins with another one, so that none always comes behind the same.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(rounds if names else 0):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            graphs[name].replay()
            after.record()
            events[name].append((before, after))
    torch.cuda.synchronize()
    timings = {}
    for name, pairs in events.items():
        times = sorted(before.elapsed_time(after) * 1e3 / calls for before, after in pairs)
        timings[name] = Timing(median(times), times[rounds // 5], times[-1 - rounds // 5])
    return timings


def time_in_graph(calls: Calls, *, rounds: int = 15) -> Timing:
    """One candidate alone; per call."""
    return time_in_turns({"": captured(calls)}, len(calls), rounds)[""]


def machine() -> dict[str, str]:
    """What a number has to be read with."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "vllm_moe_modular": __version__,
    }

"""Timing, most of it in CUDA graphs: all candidates of one point on the same inputs, replayed in turns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

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


Stamp = torch.cuda.Event | float
"""A moment: on the device's stream, or seconds of the host's clock."""


def stamp(device: torch.device) -> Stamp:
    """Now: once the device has done what it was given on the current stream; on a CPU, at once."""
    if device.type == "cpu":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def microseconds(before: Stamp, after: Stamp) -> float:
    """Between two stamps of one device, which has to be done with both."""
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event), "stamps of one device"
        return float(before.elapsed_time(after)) * 1e3
    assert isinstance(after, float), "stamps of one device"
    return (after - before) * 1e6


def timing_of(times_us: Iterable[float]) -> Timing:
    """Of at least one measurement."""
    times = sorted(times_us)
    return Timing(median(times), times[len(times) // 5], times[-1 - len(times) // 5])


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
    return {
        name: timing_of(before.elapsed_time(after) * 1e3 / calls for before, after in pairs)
        for name, pairs in events.items()
    }


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

"""What benchmarks share: shapes with their source, problems that do not sit in the cache, roofs, timing in CUDA graphs.

Letters: M tokens, K top-k, E experts, H hidden, F expert intermediate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.testing.fp8_weights import fp8_weights

BANDWIDTH_BYTES_PER_S = 4.3e12
"""Device memory of one H200: a large copy, counting bytes read and bytes written."""

BF16_FLOPS = 790e12
"""One H200: a product of 8192 x 8192 x 8192 on random data."""


FP8_FLOPS = 1580e12
"""One H200: twice as many products of fp8."""


@dataclass(frozen=True)
class Shape:
    model: str
    E: int
    K: int
    H: int
    F: int
    interleaved_swiglu: bool = False  # gpt-oss: swiglu_oai, gates and ups interleaved, biases
    fp8: bool = False  # weights in float8_e4m3fn with a scale per block of 128 x 128; else bf16

    @property
    def activation(self) -> Activation:
        if self.interleaved_swiglu:
            return Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
        return Activation(kind=ActivationKind.SILU)

    @property
    def expert_bytes(self) -> int:
        return 3 * self.H * self.F * (1 if self.fp8 else 2)


SHAPES = {
    s.model: s
    for s in (
        Shape("qwen3-30b-a3b", E=128, K=8, H=2048, F=768),
        Shape("mixtral-8x7b", E=8, K=2, H=4096, F=14336),
        Shape("qwen3-235b-half", E=64, K=8, H=4096, F=1536),
        Shape("qwen3-235b", E=128, K=8, H=4096, F=1536),
        Shape("gpt-oss-120b", E=128, K=4, H=2880, F=2880, interleaved_swiglu=True),
        Shape("deepseek-v3-ep8", E=32, K=8, H=7168, F=2048),
    )
}


def random_weights(shape: Shape) -> ExpertWeights:
    """Scaled so that the outputs are of the order of one; biases only for gpt-oss."""

    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_()

    E, H, F = shape.E, shape.H, shape.F
    if shape.fp8:
        w13, w13_scale = _random_fp8(E, 2 * F, H)
        w2, w2_scale = _random_fp8(E, H, F)
        return ExpertWeights(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
    biased = shape.interleaved_swiglu
    return ExpertWeights(
        w13=draw(E, 2 * F, H).div_(H**0.5),
        w2=draw(E, H, F).div_(F**0.5),
        w13_bias=draw(E, 2 * F) if biased else None,
        w2_bias=draw(E, H) if biased else None,
    )


def _random_fp8(E: int, N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.empty(E, N, D, device="cuda", dtype=torch.float8_e4m3fn)
    scale = torch.empty(E, -(-N // 128), -(-D // 128), device="cuda")
    for e in range(E):
        values, scale[e] = fp8_weights(torch.randn(N, D, device="cuda") / D**0.5, blocks=True)
        w[e].copy_(values)
    return w, scale


def random_steps(shape: Shape, M: int, count: int) -> list[StandardRows]:
    """Steps with routing drawn afresh: one after the other they find the weights of their experts outside L2."""
    return [
        StandardRows(
            x=torch.randn(M, shape.H, device="cuda", dtype=torch.bfloat16),
            topk_ids=torch.rand(M, shape.E, device="cuda").topk(shape.K).indices.int(),
            topk_weights=torch.rand(M, shape.K, device="cuda").softmax(-1),
        )
        for _ in range(count)
    ]


def steps_to_rotate(shape: Shape, M: int) -> int:
    """Enough calls that the weights of all of them are several times the 60 MB of L2."""
    active = min(shape.E, M * shape.K) * shape.expert_bytes
    return max(2, min(12, -(-600_000_000 // active)))


def roof_us(shape: Shape, steps: Sequence[StandardRows]) -> float:
    """The time no kernel beats: active experts' weights and the rows once over memory, or the products."""
    total = 0.0
    for step in steps:
        M = step.x.shape[0]
        active = int(step.topk_ids.unique().numel())
        moved = active * shape.expert_bytes + 2 * M * shape.H * 2
        operations = M * shape.K * 3 * shape.H * shape.F * 2
        total += max(moved / BANDWIDTH_BYTES_PER_S, operations / (FP8_FLOPS if shape.fp8 else BF16_FLOPS))
    return total / len(steps) * 1e6


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    median_us: float
    p20_us: float
    p80_us: float


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
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


def time_in_turns(graphs: Mapping[str, torch.cuda.CUDAGraph], *, calls: int, rounds: int) -> dict[str, Timing]:
    """Replay the graphs in turns, so that clocks and temperature are the same for all of them; per call.

    Timed one candidate after the other, the first one runs on a cool chip: up to 15 % faster on an H200.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            graph.replay()
            after.record()
            events[name].append((before, after))
    torch.cuda.synchronize()
    timings = {}
    for name, pairs in events.items():
        times = sorted(before.elapsed_time(after) * 1e3 / calls for before, after in pairs)
        timings[name] = Timing(median(times), times[rounds // 5], times[-1 - rounds // 5])
    return timings


def time_in_graph(calls: Sequence[Callable[[], object]], *, rounds: int = 15) -> Timing:
    """One candidate alone; per call."""
    return time_in_turns({"": captured(calls)}, calls=len(calls), rounds=rounds)[""]


def machine() -> dict[str, str]:
    """What a number has to be read with."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }

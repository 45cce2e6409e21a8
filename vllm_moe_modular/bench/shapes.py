"""The layers that benchmarks run. Standard library only, so that a command line can name them.

Letters: M tokens, K top-k, E experts, H hidden, F expert intermediate.
"""

from dataclasses import dataclass

BF16, FP8 = "bfloat16", "fp8 128x128"
"""Weights, as tuned tables call them."""

BANDWIDTH_BYTES_PER_S = 4.3e12
"""Device memory of one H200: a large copy, counting bytes read and bytes written."""

FLOPS = {BF16: 790e12, "float16": 790e12, FP8: 1580e12}
"""One H200: a product of 8192 x 8192 x 8192 on random data; twice as many products of fp8."""


@dataclass(frozen=True)
class Shape:
    """A layer on one GPU.

    Attributes:
        interleaved_swiglu: as in gpt-oss: swiglu_oai, gates and ups interleaved, biases; else silu without.
    """

    model: str
    E: int
    K: int
    H: int
    F: int
    interleaved_swiglu: bool = False
    weights: str = BF16

    @property
    def fp8(self) -> bool:
        """Whether the weights are float8_e4m3fn with a scale per block of 128 x 128."""
        return self.weights == FP8

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
"""By model; "-half" and "-ep8": one rank's share of the experts on two and on eight ranks."""

FP8_MODELS = ("qwen3-30b-a3b", "deepseek-v3-ep8")
"""What runs with --fp8 where nothing is named: both have checkpoints of this kind."""

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 16384)


def steps_to_rotate(shape: Shape, M: int) -> int:
    """Enough calls that the weights of all of them are several times the 60 MB of L2."""
    active = min(shape.E, M * shape.K) * shape.expert_bytes
    return max(2, min(12, -(-600_000_000 // active)))


def roof_us(shape: Shape, M: int, active_experts: float) -> float:
    """The time no kernel beats: active experts' weights and the rows once over memory, or the products."""
    moved = active_experts * shape.expert_bytes + 2 * M * shape.H * 2
    operations = M * shape.K * 3 * shape.H * shape.F * 2
    return max(moved / BANDWIDTH_BYTES_PER_S, operations / FLOPS[shape.weights]) * 1e6

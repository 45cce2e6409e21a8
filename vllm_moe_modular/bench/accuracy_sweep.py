"""Many seeds on every shape: how wrong our experts are at worst, as a multiple of plain torch.

Letters: M tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_moe_modular.bench.accuracy import SLACK, Judge, worst_of
from vllm_moe_modular.bench.candidates import Candidate
from vllm_moe_modular.bench.problems import CUDA, random_steps, random_weights
from vllm_moe_modular.bench.shapes import Shape
from vllm_moe_modular.modular.experts import ExpertWeights

TOKENS = (1, 8, 128, 2048)
"""One in each region of the choice of tiles."""


@dataclass(frozen=True)
class Worst:
    """Of all seeds of one point: the error over that of plain torch."""

    experts: str
    model: str
    M: int
    ratio: float

    @property
    def good(self) -> bool:
        return self.ratio <= SLACK  # NaN is not


def sweep(
    shape: Shape,
    make: Callable[[ExpertWeights], Mapping[str, Candidate]],
    *,
    seeds: int,
    tokens: Sequence[int] = TOKENS,
    device: torch.device = CUDA,
) -> Iterator[Worst]:
    """One line per candidate and number of tokens; each seed draws weights, rows and routing anew."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        weights = random_weights(shape, device)
        made = make(weights)
        for M in tokens:
            (step,) = random_steps(shape, M, 1, device)
            judge = Judge.of(shape, weights, step)
            for name, candidate in made.items():
                ratios.setdefault((name, M), []).append(judge.error(candidate.layer(step)) / judge.plain)
    for (name, M), of_point in ratios.items():
        yield Worst(name, shape.model, M, worst_of(of_point))

"""bench.accuracy and the sweep over seeds, on small shapes, with the torch experts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from vllm_moe_modular.bench.accuracy import SLACK, Judge, worst_of
from vllm_moe_modular.bench.accuracy_sweep import sweep
from vllm_moe_modular.bench.candidates import Candidate, of_part
from vllm_moe_modular.bench.problems import activation_of, random_steps, random_weights, roof_us
from vllm_moe_modular.bench.shapes import FP8, FP8_MODELS, SHAPES, Shape, steps_to_rotate
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.testing.poison import poisoned_empty

CPU = torch.device("cpu")
SMALL = Shape("small", E=4, K=2, H=64, F=32)
CASES = [SMALL, replace(SMALL, interleaved_swiglu=True), replace(SMALL, H=256, F=128, weights=FP8)]


def torch_experts(shape: Shape, weights: ExpertWeights) -> Candidate:
    return of_part(TorchExperts(activation=activation_of(shape)), weights)


@pytest.mark.parametrize("shape", CASES, ids=["silu", "interleaved swiglu with biases", "fp8"])
@pytest.mark.parametrize("M", [1, 3, 16])
def test_plain_experts_pass_and_wrong_ones_do_not(shape: Shape, M: int) -> None:
    torch.manual_seed(0)
    weights = random_weights(shape, CPU)
    (step,) = random_steps(shape, M, 1, CPU)
    judge = Judge.of(shape, weights, step)
    got = torch_experts(shape, weights).layer(step)
    assert 0 < judge.plain < 0.1
    assert judge.objection(judge.error(got)) is None
    for wrong in (got * 1.1, torch.full_like(got, float("nan")), got.roll(1, dims=1)):
        assert "of plain torch" in (judge.objection(judge.error(wrong)) or "")


def test_a_sweep_has_the_worst_of_all_seeds_of_each_point() -> None:
    errors: list[float] = []

    def make(weights: ExpertWeights) -> dict[str, Candidate]:
        right = torch_experts(SMALL, weights)
        errors.append(1 + 0.2 * len(errors))  # another one for each seed
        return {"right": right, "wrong": Candidate(lambda rows, by=errors[-1]: by * right.layer(rows))}

    found = {(w.experts, w.M): w for w in sweep(SMALL, make, seeds=3, tokens=(1, 8), device=CPU)}
    assert set(found) == {("right", 1), ("right", 8), ("wrong", 1), ("wrong", 8)}
    for M in (1, 8):
        assert found["right", M].good
        assert found["right", M].ratio <= SLACK
        assert not found["wrong", M].good
        assert found["wrong", M].ratio > 0.35 / 0.01, "of the last seed, 40 % off"


@pytest.mark.parametrize(("ratios", "worst"), [([1.0, 2.0], 2.0), ([1.0, float("nan")], None)])
def test_one_nan_is_the_worst(ratios: Sequence[float], worst: float | None) -> None:
    got = worst_of(ratios)
    assert got == worst if worst is not None else got != got


def test_workspace_of_a_part_is_what_it_asks_for() -> None:
    with poisoned_empty():
        weights = random_weights(SMALL, CPU)
    (step,) = random_steps(SMALL, 3, 1, CPU)
    nbytes = torch_experts(SMALL, weights).workspace_bytes
    assert nbytes is not None
    assert nbytes(step) == 0, "torch allocates by itself"


@pytest.mark.parametrize("model", SHAPES)
def test_steps_do_not_sit_in_the_cache(model: str) -> None:
    shape = SHAPES[model]
    count = steps_to_rotate(shape, 1)
    assert 2 <= count <= 12
    assert count * shape.K * shape.expert_bytes >= 300_000_000


def test_the_roof_is_memory_for_one_row_and_products_for_many() -> None:
    weights_us = 8 * SHAPES["qwen3-30b-a3b"].expert_bytes / 4.3e12 * 1e6
    shape = SHAPES["qwen3-30b-a3b"]
    (one,) = random_steps(replace(shape, H=8), 1, 1, CPU)
    assert roof_us(shape, [one]) == pytest.approx(weights_us, rel=0.01)
    assert set(FP8_MODELS) <= set(SHAPES)

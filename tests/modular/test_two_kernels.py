"""Rounds of one kernel, and two kernels of which the announced step chooses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_moe_modular.errors import CapacityError, IncompatiblePartsError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.kernel import ModularKernel, rounds_of, unobserved
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched
from vllm_moe_modular.modular.two_kernels import TwoKernels
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize, LocalTicket
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, right_answer

CPU = torch.device("cpu")
CASE = Case("", tokens=(7,), G=5, K=3, absent=0.3)


class Noting(LocalPrepareAndFinalize):
    """Notes the rounds; takes `tokens_per_round` at most."""

    def __init__(self, tokens_per_round: int | None = None) -> None:
        super().__init__(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)
        self.tokens_per_round = tokens_per_round
        self.rounds: list[tuple[int, int]] = []

    def prepare(
        self, x_TH: torch.Tensor, *args: Any, max_tokens_per_rank: int, **kwargs: Any
    ) -> Dispatched[LocalTicket]:
        self.rounds.append((len(x_TH), max_tokens_per_rank))
        return super().prepare(x_TH, *args, max_tokens_per_rank=max_tokens_per_rank, **kwargs)


class Reduced(Noting):
    output_is_reduced = True


def kernel_over(part: LocalPrepareAndFinalize) -> ModularKernel:
    return ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU))


def run(kernel: ModularKernel | TwoKernels, *, bound: int = 7, tokens: int = 7, **kwargs: Any) -> torch.Tensor:
    batch = make_batch(replace(CASE, tokens=(tokens,)), 0, torch.float32)
    weights = make_weights(CASE, torch.float32)
    return kernel.apply(batch.x, batch.topk_ids, batch.topk_weights, weights, max_tokens_per_rank=bound, **kwargs)


@pytest.mark.parametrize(
    ("tokens", "most", "per_round", "want"),
    [
        pytest.param(5, 5, None, [(5, 5)], id="no limit"),
        pytest.param(5, 8, 8, [(5, 8)], id="exactly one round"),
        pytest.param(0, 0, 8, [(0, 0)], id="no tokens anywhere are a round too"),
        pytest.param(9, 9, 8, [(8, 8), (1, 1)], id="one token more"),
        pytest.param(3, 20, 8, [(3, 8), (0, 8), (0, 4)], id="a rank that is done goes on"),
        pytest.param(22, 20, 8, [(8, 8), (8, 8), (6, 4)], id="more than announced is left to the last round"),
    ],
)
def test_rounds_follow_from_the_fullest_rank(
    tokens: int, most: int, per_round: int | None, want: list[tuple[int, int]]
) -> None:
    rounds = rounds_of(tokens, most, per_round)
    assert [(len(range(tokens)[mine]), bound) for mine, bound in rounds] == want


@pytest.mark.parametrize("bound", [7, 9, 10])
def test_a_step_in_rounds_is_the_step(bound: int) -> None:
    part, calls = Noting(3), []
    out = run(kernel_over(part), bound=bound, meanwhile=lambda: calls.append(1))
    assert torch.allclose(out.double(), right_answer(CASE, 0, torch.float32), atol=1e-5)
    assert [n for n, _ in part.rounds] == [3, 3, 1, 0][: len(part.rounds)]
    assert sum(most for _, most in part.rounds) == bound
    assert calls == [1]


def test_more_than_announced_is_refused_in_rounds_too() -> None:
    part = Noting(3)
    with pytest.raises(CapacityError, match="Noting: 7 tokens in a step of 2 rounds announced as at most 6 per rank"):
        run(kernel_over(part), bound=6)
    assert part.rounds == [], "nothing was sent"


def test_work_meanwhile_does_not_run_if_a_round_before_it_fails() -> None:
    class Failing(Noting):
        def prepare(self, *_: Any, **__: Any) -> Dispatched[LocalTicket]:
            raise RuntimeError("lost")

    calls: list[int] = []
    with pytest.raises(RuntimeError, match="lost"):
        run(kernel_over(Failing(3)), meanwhile=lambda: calls.append(1))
    assert calls == []


@pytest.mark.parametrize(("tokens", "bound", "which"), [(7, 7, 1), (2, 4, 0), (2, 5, 1), (0, 0, 0), (0, 9, 1)])
def test_the_announced_step_chooses_not_what_a_rank_has(tokens: int, bound: int, which: int) -> None:
    parts = [Noting(), Noting()]
    both = TwoKernels(small=kernel_over(parts[0]), large=kernel_over(parts[1]), most_small=4)
    run(both, bound=bound, tokens=tokens)
    assert [len(part.rounds) for part in parts] == [1 - which, which]
    assert both.prepare_finalize is parts[1]


def test_both_are_looked_at() -> None:
    both = TwoKernels(small=kernel_over(Noting()), large=kernel_over(Noting()), most_small=4)
    seen: list[int] = []

    def observe(x_TH: torch.Tensor) -> Any:
        seen.append(len(x_TH))
        return unobserved

    both.observe = observe
    run(both, tokens=2, bound=2)
    run(both)
    assert seen == [2, 7]
    assert both.observe is observe


def test_one_whose_output_is_summed_beside_one_whose_is_not_is_refused() -> None:
    with pytest.raises(IncompatiblePartsError, match="Reduced for small steps beside Noting"):
        TwoKernels(small=kernel_over(Reduced()), large=kernel_over(Noting()), most_small=4)


def test_scratch_memory_is_that_of_the_larger() -> None:
    small, large = kernel_over(Noting(3)), kernel_over(Noting())
    weights, given = make_weights(CASE, torch.float32), {"top_k": 3, "dtype": torch.float32}
    both = TwoKernels(small=small, large=large, most_small=4)
    assert both.workspace_bytes(weights, max_tokens_per_rank=9, **given) == max(
        small.workspace_bytes(weights, max_tokens_per_rank=4, **given),
        large.workspace_bytes(weights, max_tokens_per_rank=9, **given),
    )

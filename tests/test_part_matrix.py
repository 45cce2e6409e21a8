"""Every all-to-all with every expert kernel, from the registry: what fits computes right, the rest is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests import matrix_calls
from vllm_moe_modular.errors import NoUsablePartError
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.selection.select import pair_objection, select
from vllm_moe_modular.testing.layers import Case, make_batch, make_weights, plain_torch, right_answer
from vllm_moe_modular.testing.ranks import Ranks
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

CPU = Device(kind="cpu")
ALL_TO_ALLS, EXPERTS = (list(builtin_registry().of(kind)) for kind in (PartKind.PREPARE_FINALIZE, PartKind.EXPERTS))
EXPERTS = [part for part in EXPERTS if not part.per_layer]  # those of a server's layer are tried where it serves
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Served:
    """How many ranks, and whether all of them start out with the same tokens."""

    why: str
    ranks: int
    replicated: bool

    @property
    def problem(self) -> Problem:
        sizes = {"tp_size": self.ranks} if self.replicated else {"dp_size": self.ranks}
        return Problem(
            num_experts=7, num_local_experts=-(-7 // self.ranks), top_k=3, hidden=64, intermediate=8,
            has_bias=True, dtype="bfloat16", ep_size=self.ranks, **sizes,
        )  # fmt: skip

    @property
    def case(self) -> Case:
        tokens = (5,) * self.ranks if self.replicated else (5, 0, 3)[: self.ranks]
        return Case(self.why, tokens=tokens, G=7, K=3, absent=0.2)


SERVED = [
    Served("one rank", 1, replicated=True),
    Served("two ranks", 2, replicated=False),
    Served("three ranks", 3, replicated=False),
    Served("two ranks with the same tokens", 2, replicated=True),
    Served("three ranks with the same tokens", 3, replicated=True),
]


@pytest.mark.parametrize("served", SERVED, ids=lambda served: served.why)
@pytest.mark.parametrize("experts", EXPERTS, ids=lambda part: part.name)
@pytest.mark.parametrize("all2all", ALL_TO_ALLS, ids=lambda part: part.name)
def test_a_pair_computes_right_or_is_refused(
    all2all: Part, experts: Part, served: Served, ranks_of: Callable[[int], Ranks]
) -> None:
    selection = select(builtin_registry(), served.problem, CPU, all2all=all2all.name, experts=experts.name)
    if selection.choice is None:
        with pytest.raises(NoUsablePartError) as refusal:
            selection.require()
        reasons = [*all2all.objections(served.problem, CPU), *experts.objections(served.problem, CPU)]
        reasons += [f"module {m} is not installed" for part in (all2all, experts) for m in part.missing_modules()]
        reasons += [why for why in [pair_objection(all2all, experts)] if why and not reasons]
        assert reasons, "a pair without any objection is refused"
        assert all(reason in str(refusal.value) for reason in reasons)
        return
    case = served.case
    targets = all2all.target, experts.target
    outputs = ranks_of(served.ranks).run(matrix_calls.layer, *targets, case, DTYPE, served.replicated, timeout_s=60)
    weights = make_weights(case, DTYPE)
    sources = [0 if served.replicated else rank for rank in range(served.ranks)]
    naive = [plain_torch(make_batch(case, source, DTYPE), weights, weight_on_input=False) for source in sources]
    truth = [right_answer(case, source, DTYPE) for source in sources]
    assert_as_accurate_as(torch.cat(outputs), torch.cat(naive), torch.cat(truth))


def test_every_part_is_in_the_matrix() -> None:
    """A format that no experts take, or a sum that nobody makes, would leave a part without a partner."""
    assert all(any(pair_objection(a, e) is None for e in EXPERTS) for a in ALL_TO_ALLS)
    delivered = {a.activation_format for a in ALL_TO_ALLS}  # the batched format by parts of other people only, so far
    fitting = [e for e in EXPERTS if e.activation_format in delivered]
    assert all(any(pair_objection(a, e) is None for a in ALL_TO_ALLS) for e in fitting)


def test_a_part_of_another_format_is_refused_with_the_reason() -> None:
    registry = builtin_registry()
    other = next(
        format_ for format_ in type(EXPERTS[0].activation_format) if format_ is not ALL_TO_ALLS[0].activation_format
    )
    registry.add(replace(EXPERTS[-1], name="other", activation_format=other))
    selection = select(registry, SERVED[1].problem, CPU, all2all="torch", experts="other")
    with pytest.raises(NoUsablePartError, match=f"torch delivers standard rows, other takes {other.value} ones"):
        selection.require()

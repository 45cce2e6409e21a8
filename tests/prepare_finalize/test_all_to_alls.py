"""Every all-to-all that runs on a CPU, over real ranks, against the layer without ranks in float64.

The list comes from the registry: a new part is tested here without an edit.
"""

from collections.abc import Callable

import pytest
import torch

from tests.prepare_finalize import on_ranks
from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.testing.layers import Case, make_batch, make_weights, plain_torch, right_answer
from vllm_moe_modular.testing.ranks import Ranks
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

OWN_TOKENS = Problem(
    num_experts=8, num_local_experts=4, top_k=2, hidden=64, intermediate=8, dtype="float32", dp_size=2, ep_size=2
)
PARTS = [
    part.name
    for part in builtin_registry().of(PartKind.PREPARE_FINALIZE)
    if part.activation_format is ActivationFormat.STANDARD
    and not part.objections(OWN_TOKENS, Device(kind="cpu"))
    and not part.missing_modules()
]
TIMEOUT_S = 90.0

CASES = [
    Case("one token each", tokens=(1, 1), G=2, K=1),
    Case("as many tokens on both", tokens=(4, 4)),
    Case("ragged", tokens=(7, 2)),
    Case("zero tokens on one rank", tokens=(4, 0)),
    Case("zero tokens on all ranks", tokens=(0, 0)),
    Case("all tokens to one expert", tokens=(5, 3), K=1, only_expert=6),
    Case("some ids of -1", tokens=(6, 5), absent=0.5),
    Case("all ids of -1", tokens=(3, 2), absent=1.0),
    Case("12 experts on 2 ranks", tokens=(5, 6), G=12, K=3),
    Case("3 experts on 2 ranks", tokens=(5, 6), G=3, K=2),
    Case("top 8", tokens=(4, 3), K=8),
    Case("rows of an odd number of bytes", tokens=(3, 4), H=63),
    Case("experts scattered over ranks", tokens=(5, 4), scattered=True),
    Case("router weight on input", tokens=(4, 5), weight_on_input=True),
    Case("announced more tokens than there are", tokens=(2, 3), max_tokens=9),
    Case("ids in int32", tokens=(3, 3), ids_dtype=torch.int32, absent=0.3),
    Case("7 experts on 3 ranks", tokens=(3, 0, 6), G=7, K=3, absent=0.2),
    Case("6 experts on 4 ranks", tokens=(3, 1, 0, 5), G=6, K=3, absent=0.2),
    Case("a rank without experts", tokens=(3, 1, 2, 5), G=3, K=2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_is_the_layer_without_ranks(
    name: str, case: Case, dtype: torch.dtype, ranks_of: Callable[[int], Ranks]
) -> None:
    outputs = ranks_of(case.num_ranks).run(on_ranks.layer, name, case, dtype, timeout_s=TIMEOUT_S)
    assert [out.shape for out in outputs] == [(T, case.H) for T in case.tokens]
    assert {out.dtype for out in outputs} == {dtype}
    weights, batches = make_weights(case, dtype), [make_batch(case, rank, dtype) for rank in range(case.num_ranks)]
    naive = [plain_torch(batch, weights, weight_on_input=case.weight_on_input) for batch in batches]
    truth = [right_answer(case, rank, dtype) for rank in range(case.num_ranks)]
    assert_as_accurate_as(torch.cat(outputs), torch.cat(naive), torch.cat(truth))


@pytest.mark.parametrize("name", PARTS)
def test_two_calls_in_flight_do_not_mix(name: str, ranks_of: Callable[[int], Ranks]) -> None:
    case = Case("", tokens=(5, 3, 4), absent=0.2)
    for pairs in ranks_of(3).run(on_ranks.two_calls_in_flight, name, case, timeout_s=TIMEOUT_S):
        for overlapping, one_by_one in pairs:
            assert torch.equal(overlapping, one_by_one)


@pytest.mark.parametrize("name", PARTS)
def test_the_same_bits_every_time(name: str, ranks_of: Callable[[int], Ranks]) -> None:
    case = Case("", tokens=(6, 5, 4), G=9, K=6)
    first, *others = (
        ranks_of(3).run(on_ranks.layer, name, case, torch.bfloat16, timeout_s=TIMEOUT_S) for _ in range(5)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

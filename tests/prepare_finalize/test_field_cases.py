"""Mistakes that real deployments made, one test each, for every all-to-all that runs on a CPU."""

from collections.abc import Callable

import pytest
import torch

from tests.prepare_finalize import field_calls
from tests.prepare_finalize.test_all_to_alls import PARTS, TIMEOUT_S
from vllm_moe_modular.testing.layers import Case, make_batch, right_answer
from vllm_moe_modular.testing.ranks import Ranks

Start = Callable[[int], Ranks]


@pytest.mark.parametrize("name", PARTS)
def test_shared_experts_get_the_original_rows_not_the_dispatched_ones(name: str, ranks_of: Start) -> None:
    case = Case("", tokens=(5, 2), absent=0.2)
    answers = ranks_of(2).run(field_calls.shared_and_routed, name, case, timeout_s=TIMEOUT_S)
    for rank, (seen, routed, calls) in enumerate(answers):
        assert calls == 1
        assert torch.equal(seen, make_batch(case, rank, torch.float32).x)
        assert torch.allclose(routed.double(), right_answer(case, rank, torch.float32), atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_routed_path_does_not_scale_its_input_before_the_shared_experts_ran(name: str, ranks_of: Start) -> None:
    case = Case("", tokens=(4, 4), K=1, weight_on_input=True)
    answers = ranks_of(2).run(field_calls.shared_and_routed, name, case, timeout_s=TIMEOUT_S)
    for rank, (seen, _, _) in enumerate(answers):
        assert torch.equal(seen, make_batch(case, rank, torch.float32).x)


@pytest.mark.parametrize("name", PARTS)
def test_id_of_minus_one_does_not_wrap_to_the_last_expert(name: str, ranks_of: Start) -> None:
    case = Case("", tokens=(3, 3), G=4, K=1, only_expert=0)
    answers = ranks_of(2).run(field_calls.minus_one_beside_the_last_expert, name, timeout_s=TIMEOUT_S)
    for rank, out in enumerate(answers):
        weights = make_batch(case, rank, torch.float32).topk_weights.double()
        assert torch.allclose(out.double(), right_answer(case, rank, torch.float32) / weights * 0.5, atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_id_past_the_end_of_the_expert_map_is_refused_before_anything_is_sent(name: str, ranks_of: Start) -> None:
    (message, steps), _ = ranks_of(2).run(field_calls.refused_before_sending, name, "id", timeout_s=TIMEOUT_S)
    assert f"{name}, rank 0: topk_ids names expert 4, the layer has experts 0 to 3" in message
    assert steps == 0


@pytest.mark.parametrize("name", PARTS)
def test_more_tokens_than_announced_are_refused_before_anything_is_sent(name: str, ranks_of: Start) -> None:
    (message, steps), _ = ranks_of(2).run(field_calls.refused_before_sending, name, "capacity", timeout_s=TIMEOUT_S)
    assert f"{name}, rank 0: 3 tokens in a step announced as at most 2 per rank" in message
    assert steps == 0


@pytest.mark.parametrize("tokens", [(3, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_rank_with_zero_tokens_takes_part_in_every_collective(
    name: str, tokens: tuple[int, int], ranks_of: Start
) -> None:
    some, none = (
        ranks_of(2).run(field_calls.steps_begun, name, Case("", tokens=t), timeout_s=TIMEOUT_S)
        for t in ((3, 3), tokens)
    )
    assert some[0] == some[1] > 0
    assert none == some


def test_buffers_sized_by_the_data_parallel_group_are_refused(ranks_of: Start) -> None:
    for message in ranks_of(4).run(field_calls.sized_by_the_wrong_group, timeout_s=TIMEOUT_S):
        assert "the experts are placed on 2 ranks, the process group has 4" in message
        assert "tensor-parallel x data-parallel" in message


def test_a_token_crosses_once_to_a_rank_however_many_of_its_experts_live_there(ranks_of: Start) -> None:
    ids = torch.tensor([[0, 1, -1], [2, 3, 0], [3, 2, -1], [-1, -1, -1]])
    answers = ranks_of(2).run(field_calls.traffic_of, "torch", ids, timeout_s=TIMEOUT_S)
    assert answers == [([2, 2], [2, 2], 4)] * 2


def test_all_gather_counts_every_row_it_sends(ranks_of: Start) -> None:
    answers = ranks_of(2).run(field_calls.traffic_of, "allgather", torch.tensor([[0], [1], [2]]), timeout_s=TIMEOUT_S)
    assert answers == [([3, 3], [3, 3], 6)] * 2


@pytest.mark.parametrize("name", PARTS)
def test_rows_that_only_pad_have_no_expert(name: str, ranks_of: Start) -> None:
    case = Case("", tokens=(5, 1), K=1, only_expert=0, max_tokens=8)
    assert ranks_of(2).run(field_calls.rows_with_an_expert, name, case, timeout_s=TIMEOUT_S) == [6, 0]


@pytest.mark.parametrize("name", PARTS)
def test_partial_sums_are_rounded_once(name: str, ranks_of: Start) -> None:
    """256 + 1 + 1 in bfloat16 is 256 if every sum is rounded."""
    assert ranks_of(3).run(field_calls.sum_of_partial_sums, name, timeout_s=TIMEOUT_S) == [258.0] * 3


@pytest.mark.parametrize("name", PARTS)
def test_finalize_async_leaves_time_for_other_work(name: str, ranks_of: Start) -> None:
    (starting, waiting), _ = ranks_of(2).run(field_calls.seconds_of_finalize_async, name, timeout_s=TIMEOUT_S)
    assert starting < 0.4
    assert waiting > 0.6

"""A process group whose failures have names, over real ranks."""

from collections.abc import Callable

import pytest
import torch

from tests.modular import group_calls
from vllm_moe_modular.modular.heartbeat import MISSED_BEATS_OF_THE_DEAD, PERIOD_S
from vllm_moe_modular.testing.ranks import Ranks, run_ranks

WHERE = r"step 5, phase 'combine'"
TO_JUDGE_S = (MISSED_BEATS_OF_THE_DEAD + 2) * PERIOD_S
SLACK_S = 1.0  # a machine with other things to do


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn], ids=str)
def test_ragged_exchange_brings_rows_in_the_order_of_ranks(
    dtype: torch.dtype, ranks_of: Callable[[int], Ranks]
) -> None:
    received = ranks_of(3).run(group_calls.ragged_exchange, dtype, timeout_s=60)
    for rank, rows in enumerate(received):
        values = [torch.tensor(10.0 * source + rank).to(dtype).item() for source in range(3) for _ in range(rank)]
        assert rows == [[value] * 3 for value in values]


def test_gather_brings_blocks_in_the_order_of_ranks(ranks_of: Callable[[int], Ranks]) -> None:
    assert ranks_of(3).run(group_calls.gather, timeout_s=60) == [[0, 0, 1, 1, 2, 2]] * 3


def test_exchanges_in_flight_over_two_groups_of_the_same_ranks_do_not_mix(ranks_of: Callable[[int], Ranks]) -> None:
    want = [100.0 * number + source for number in range(4) for source in range(3)]
    assert ranks_of(3).run(group_calls.waited_for_in_reverse, timeout_s=60) == [want] * 3


def test_killed_rank_is_named_with_step_and_phase() -> None:
    errors = run_ranks(group_calls.lose_a_rank, 3, 1, "kill", timeout_s=60, dying=[1])
    assert errors[1] is None
    for rank in (0, 2):
        (with_store, seconds), (again, at_once), (without, _) = errors[rank]
        assert f"rank {rank} of 3, {WHERE}: rank 1 is dead: its heartbeat stopped, last at step 4" in with_store
        assert "restart all of its ranks" in with_store
        assert seconds < TO_JUDGE_S + SLACK_S, "a closed connection is not waited for until the timeout"
        assert again == with_store
        assert at_once < 0.1
        assert f"{WHERE}: nothing came from rank 1. " in without


def test_stalled_rank_is_named_with_step_and_phase_and_told() -> None:
    errors = run_ranks(group_calls.lose_a_rank, 3, 2, "stall", timeout_s=60)
    for rank in (0, 1):
        (with_store, seconds), (again, _), (without, seconds_without) = errors[rank]
        assert f"rank {rank} of 3, {WHERE}: rank 2 is alive but stalled at step 4, phase 'dispatch'. " in with_store
        assert "VLLM_MOE_MODULAR_TIMEOUT_S" in with_store
        assert again == with_store
        assert f"{WHERE}: nothing came from rank 2. " in without
        assert max(seconds, seconds_without) < group_calls.TIMEOUT_S + SLACK_S
    assert "gave up at step 5, phase 'combine' waiting for this rank, which came too late" in errors[2][0][0]


def test_a_process_ends_although_it_still_waited_for_a_stalled_rank() -> None:
    """A collective of gloo would go on in the background, and the process end only with the stalled one."""
    limit_s = 2 * group_calls.TIMEOUT_S + 4 * SLACK_S + 1.2
    run_ranks(group_calls.lose_a_rank, 2, 1, "stall and leave", timeout_s=limit_s, dying=[0], lingering=[1])


def test_where_the_store_is_gone_its_host_is_named() -> None:
    errors = run_ranks(group_calls.lose_a_rank, 3, 0, "kill", timeout_s=60, dying=[0])
    for rank in (1, 2):
        (with_store, seconds), *_ = errors[rank]
        assert f"rank {rank} of 3, {WHERE}: the store does not answer, so rank 0, whose process serves it, is dead" in (
            with_store
        )
        assert seconds < TO_JUDGE_S + SLACK_S


@pytest.mark.parametrize("late", [None, 0], ids=["all at the same beat", "one after the others have left"])
def test_rank_that_raised_is_named_with_its_error_at_once(late: int | None) -> None:
    answers = run_ranks(group_calls.raise_on_one, 3, 2, late, timeout_s=60)
    for message, rank, step, phase, seconds in answers[:2]:
        assert "phase 'combine': rank 2 raised LookupError: no room here after step 2, phase 'dispatch'. " in message
        assert (rank, step, phase) == (2, 3, "combine")
        assert seconds < TO_JUDGE_S + SLACK_S, "nobody waits for the timeout"


@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_a_step_that_all_ranks_refuse_loses_nobody(late_s: float) -> None:
    assert run_ranks(group_calls.refused_everywhere, 3, late_s, timeout_s=60) == ["right"] * 3

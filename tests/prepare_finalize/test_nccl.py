"""The all-to-alls of torch.distributed on real GPUs."""

import time
from collections.abc import Iterator

import pytest
import torch

from tests.prepare_finalize import nccl_calls, on_ranks
from vllm_moe_modular.testing.layers import Case, make_batch, make_weights, plain_torch, right_answer
from vllm_moe_modular.testing.ranks import Ranks, run_ranks
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

PARTS = ["torch", "allgather"]
TIMEOUT_S = 120.0

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs"),
]

CASES = [
    Case("ragged", tokens=(70, 20), absent=0.2),
    Case("zero tokens on one rank", tokens=(4, 0)),
    Case("zero tokens on all ranks", tokens=(0, 0)),
    Case("all ids of -1", tokens=(3, 2), absent=1.0),
    Case("3 experts on 2 ranks in int32", tokens=(50, 60), G=3, ids_dtype=torch.int32),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl") as started:
        yield started


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_is_the_layer_without_ranks(name: str, case: Case, dtype: torch.dtype, ranks: Ranks) -> None:
    outputs = ranks.run(on_ranks.layer, name, case, dtype, timeout_s=TIMEOUT_S)
    batches, weights = [make_batch(case, rank, dtype) for rank in (0, 1)], make_weights(case, dtype)
    naive = [plain_torch(batch, weights, weight_on_input=False) for batch in batches]
    truth = [right_answer(case, rank, dtype) for rank in (0, 1)]
    assert_as_accurate_as(torch.cat(outputs), torch.cat(naive), torch.cat(truth))


@pytest.mark.parametrize("name", PARTS)
def test_two_calls_in_flight_do_not_mix(name: str, ranks: Ranks) -> None:
    case = Case("", tokens=(50, 30), absent=0.2)
    for pairs in ranks.run(on_ranks.two_calls_in_flight, name, case, timeout_s=TIMEOUT_S):
        for overlapping, one_by_one in pairs:
            assert torch.equal(overlapping, one_by_one)


@pytest.mark.parametrize("name", PARTS)
def test_id_past_the_end_of_the_expert_map_counts_as_none(name: str, ranks: Ranks) -> None:
    for past_the_end, none in ranks.run(nccl_calls.past_the_end_and_none, name, timeout_s=TIMEOUT_S):
        assert torch.equal(past_the_end, none)


def test_all_gather_is_captured_in_a_cuda_graph(ranks: Ranks) -> None:
    for captured, eager in ranks.run(nccl_calls.captured_and_eager, timeout_s=TIMEOUT_S):
        assert torch.equal(captured, eager)


@pytest.mark.parametrize(
    ("how", "what"), [("kill", "rank 1 is dead"), ("stall", "rank 1 is alive but stalled at step 1")]
)
def test_lost_rank_is_named_when_the_host_waits_for_counts(how: str, what: str) -> None:
    start = time.monotonic()
    mode = {"dying": [1]} if how == "kill" else {"lingering": [1]}
    (error, seconds), _ = run_ranks(nccl_calls.lose_rank_1, 2, how, timeout_s=60, backend="nccl", **mode)
    assert f"rank 0 of 2, step 2, phase 'combine': {what}" in error
    assert seconds < nccl_calls.LOSS_TIMEOUT_S + 2
    assert time.monotonic() - start < 60

"""bench.all_to_all on gloo ranks of a CPU: the same code as on GPUs, in eager mode and with the host's clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from vllm_moe_modular.bench import all_to_all
from vllm_moe_modular.bench.all_to_all import Tried, calls_of, measure_all, try_out
from vllm_moe_modular.bench.all_to_all_cases import BFLOAT16, EAGER, FP8, GRAPHS, Case, Plan, peer_names, why_not
from vllm_moe_modular.bench.all_to_all_peers import OurPart, draw, right_answer
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.selection.problem import Device
from vllm_moe_modular.testing.ranks import Here, Ranks

CASE = Case(T=5, H=256, G=8, K=2, rows=BFLOAT16, capacity_tokens=8, low_latency_tokens=4)
CPU, H200 = Device(kind="cpu"), Device(kind="cuda", sm=90, peer_access=True)
PLAN = Plan(ranks=2, cases=[CASE], modes=[EAGER], peers=["torch", "allgather"], turns=1, device=CPU)


def test_what_runs_on_a_cpu_is_measured_and_what_does_not_says_why(ranks_of: Callable[[int], Ranks]) -> None:
    plan = replace(PLAN, cases=[replace(CASE, T=1), CASE], peers=peer_names())
    results = list(measure_all(ranks_of(2), plan))
    assert len(results) == 2 * len(peer_names())
    timed = {(r["peer"], r["T"]): r for r in results if "not_run" not in r}
    assert timed.keys() == {(peer, T) for peer in ("torch", "allgather") for T in (1, 5)}
    for (peer, _), r in timed.items():
        assert r["ran"] == {"torch": "TorchPrepareAndFinalize", "allgather": "AllGatherPrepareAndFinalize"}[peer]
        assert r["combine_takes"] == "reduced rows"
        assert 0 < r["p20_us"] <= r["median_us"] <= r["p80_us"]
        assert r["dispatch_us"] > 0
        assert r["combine_us"] > 0
    reasons = {r["peer"]: r["not_run"] for r in results if "not_run" in r}
    assert all("runs on cuda, this device is cpu" in why for why in reasons.values())


def test_rows_in_fp8_of_a_peer_that_sends_none_are_not_timed(ranks_of: Callable[[int], Ranks]) -> None:
    plan = replace(PLAN, cases=[replace(CASE, rows=FP8)])
    for result in measure_all(ranks_of(2), plan):
        assert result["not_run"] == f"rows in fp8 in {result['peer']} is not supported; it sends bfloat16"


class LosesTheLastToken(OurPart):
    def combine(self, sent: Any, y: torch.Tensor) -> torch.Tensor:
        out = super().combine(sent, y)
        out[-1] = 0
        return out


def try_a_wrong_one(here: Here) -> Tried:
    with patch.object(all_to_all, "make", lambda peer, here, case: LosesTheLastToken(peer, here, case)):
        return try_out(here, "allgather", CASE, EAGER)


def test_a_wrong_answer_is_not_timed(ranks_of: Callable[[int], Ranks]) -> None:
    tried = ranks_of(2).run(try_a_wrong_one, timeout_s=60)
    assert [t.why_not for t in tried] == [f"what comes home to rank {rank} is wrong" for rank in (0, 1)]


def test_what_ends_the_ranks_costs_the_others_nothing(ranks_of: Callable[[int], Ranks]) -> None:
    """A name that nobody knows raises on the ranks, as a library may."""
    plan = replace(PLAN, cases=[replace(CASE, T=1), CASE], peers=["unknown", "nccl", "allgather"], device=H200)
    results = {(r["peer"], r["T"]): r for r in measure_all(ranks_of(2), plan)}
    assert results["unknown", 1]["not_run"] == "KeyError: 'unknown'"
    assert results["unknown", 5]["not_run"] == "left out, as it failed at T 1, hidden 256"
    assert "NCCL on ranks that met over gloo" in results["nccl", 5]["not_run"]
    assert results["allgather", 5]["median_us"] > 0


def fails_in_company(here: Here, peers: Sequence[str], *_: Any) -> dict[str, Any]:
    if "torch" in peers:
        raise RuntimeError("torch cannot be timed")
    return {peer: {"median_us": 10.0 + here.rank} for peer in peers}


def test_one_that_cannot_be_timed_is_named_and_the_others_are_timed(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_to_all, "time_peers", fails_in_company)
    results = {r["peer"]: r for r in measure_all(ranks_of(2), PLAN)}
    assert results["torch"]["not_run"] == "RuntimeError: torch cannot be timed"
    assert results["allgather"]["median_us"] == 11.0, "that of the slower rank"


def test_what_is_known_before_anything_runs() -> None:
    cannot = "cannot be captured in a CUDA graph (the host reads how many rows arrive)"
    gpu = replace(PLAN, device=H200)
    assert why_not("torch", CASE, GRAPHS, gpu) == cannot
    assert not why_not("torch", CASE, EAGER, gpu)
    assert not why_not("allgather", CASE, GRAPHS, gpu)
    assert "over gloo" in why_not("allgather", CASE, GRAPHS, replace(gpu, shared_gpu=True))
    assert not why_not("allgather", CASE, EAGER, replace(gpu, shared_gpu=True))
    for peer in ("deepep_high_throughput", "deep_ep.high_throughput"):
        assert why_not(peer, CASE, GRAPHS, gpu).endswith(cannot)
        assert "3 ranks share the experts" in why_not(peer, CASE, EAGER, replace(gpu, ranks=3))
    assert not {"local", "deepep_auto"} & set(peer_names())


def test_tokens_are_the_same_in_fp8() -> None:
    here: Any = SimpleNamespace(device=torch.device("cpu"), rank=1)
    tokens = draw(CASE, here, 0)
    assert torch.equal(dequantize_fp8(*quantize_fp8(tokens.x)).bfloat16(), tokens.x)
    assert torch.equal(right_answer(tokens).double(), tokens.x.double() * CASE.K)
    assert tokens.x.unique().numel() == 15


def test_fewer_round_trips_where_each_takes_long() -> None:
    assert [calls_of(T) for T in (1, 1024, 4096, 8192)] == [12, 12, 4, 3]

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_moe_modular.errors import AgreementError, NoUsablePartError
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.selection.problem import Problem
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter import agreement
from vllm_moe_modular.vllm_adapter.agreement import (
    _missing_anywhere,
    _require_known_everywhere,
    agree_on_layer,
    exchange,
    require_equal,
)
from vllm_moe_modular.vllm_adapter.layer import Ranks
from vllm_moe_modular.vllm_adapter.runtime import Plan, Runtime


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))


def test_every_rank_gets_every_record(store: dist.TCPStore) -> None:
    def run(rank: int) -> list[dict[str, int]]:
        return exchange(client(store), topic="t", rank=rank, size=3, record={"rank": rank}, timeout_s=10)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_a_silent_rank_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(AgreementError, match=r"rank 0 of 3: ranks \[1, 2\].*VLLM_MOE_MODULAR"):
        exchange(store, topic="t", rank=0, size=3, record={}, timeout_s=0.2)


def test_differences_name_the_field_and_the_ranks() -> None:
    records = [{"all2all": "torch", "dtype": "float32"}, {"all2all": "allgather", "dtype": "float32"}]
    with pytest.raises(AgreementError) as error:
        require_equal(records, what="their settings")
    assert 'all2all: "torch" on ranks [0], "allgather" on ranks [1]' in str(error.value)
    assert "dtype" not in str(error.value)


def test_a_field_that_one_rank_lacks_is_a_difference() -> None:
    with pytest.raises(AgreementError, match="version"):
        require_equal([{"version": "1"}, {}], what="their settings")


def test_a_library_that_one_rank_lacks_is_named_with_the_rank() -> None:
    both = {"m:Torch": [], "m:DeepEP": []}
    said = _missing_anywhere([both, {**both, "m:DeepEP": ["module deep_ep"]}, {"m:Torch": []}])
    assert said == {
        "m:Torch": [],
        "m:DeepEP": ["module deep_ep on ranks [1]", "the package of this part on ranks [2]"],
    }


def test_a_part_that_one_rank_does_not_know_is_named_with_the_rank_on_every_rank() -> None:
    runtime = Runtime(Settings(enabled=True, all2all="torch"))
    here = runtime.part_names()
    _require_known_everywhere(runtime, [here, here])
    with pytest.raises(AgreementError, match=r"all-to-all 'torch' was asked for and is not known on ranks \[1\]"):
        _require_known_everywhere(runtime, [here, {**here, "all-to-all": ["local"]}])


def test_a_part_that_no_rank_knows_lists_the_known_ones() -> None:
    runtime = Runtime(Settings(enabled=True, experts="tritom"))
    with pytest.raises(NoUsablePartError, match=r"'tritom' is not known; known: auto"):
        _require_known_everywhere(runtime, [runtime.part_names()] * 2)


def test_a_layer_of_a_second_model_is_agreed_on_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one process share a store, and their layers have the same names."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: store)

    def agree(rank: int, load: int, num_experts: int) -> ExpertPlacement:
        runtime = Runtime(Settings(enabled=True), load=load)
        group: Any = SimpleNamespace(global_ranks=(0, 1))
        runtime.group = group
        half = num_experts // 2
        layer: Any = SimpleNamespace(
            name="model.layers.0.mlp.experts", ranks=Ranks(rank, 2, 0, 1, False), device=torch.device("cpu"),
            expert_map=[i % half if i // half == rank else -1 for i in range(num_experts)],
        )  # fmt: skip
        problem = Problem(num_experts=num_experts, num_local_experts=half, top_k=2, hidden=8, intermediate=6, ep_size=2)
        return agree_on_layer(layer, Plan(problem, None, ""), runtime)

    for load, num_experts in enumerate((4, 8)):
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(agree, 0, load, num_experts)
            time.sleep(0.3)  # what rank 1 has said by now is of the model before
            second = pool.submit(agree, 1, load, num_experts)
            assert first.result() == second.result()
            assert first.result().num_experts == num_experts

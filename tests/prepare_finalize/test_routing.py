import torch

from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.prepare_finalize.routing import (
    expert_table,
    known_ids,
    local_ids_on,
    pack_routing,
    unpack_routing,
)


def test_what_is_no_expert_is_looked_up_as_none() -> None:
    """As on a GPU, where ids are not checked."""
    table = expert_table([7, 8, 9], torch.device("cpu"))
    ids = torch.tensor([[-1, 0, 2], [3, 2**30, -(2**30)]], dtype=torch.int32)
    assert table[known_ids(ids, 3)].tolist() == [[-1, 7, 9], [-1, -1, -1]]


def test_local_ids_of_a_rank() -> None:
    assert local_ids_on(ExpertPlacement.linear(5, 2), 1) == [-1, -1, -1, 0, 1]


def test_routing_survives_packing() -> None:
    ids, weights = torch.tensor([[5, -1], [0, 2]]), torch.tensor([[0.1, float("nan")], [3e38, -0.0]])
    got_ids, got_weights = unpack_routing(pack_routing(ids, weights))
    assert torch.equal(got_ids, ids.int())
    assert torch.equal(got_weights.view(torch.int32), weights.view(torch.int32))


def test_routing_of_no_rows_survives_packing() -> None:
    ids, weights = unpack_routing(pack_routing(torch.empty((0, 2), dtype=torch.int64), torch.empty((0, 2))))
    assert ids.shape == weights.shape == (0, 2)

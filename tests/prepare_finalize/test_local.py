"""No communication: the ranks' outputs add up to the layer, whoever adds them."""

import pytest
import torch

from vllm_moe_modular.errors import AgreementError, CapacityError, ExpertIdError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, of_rank, right_answer

CPU = torch.device("cpu")


def rows_of(part: LocalPrepareAndFinalize, ids: torch.Tensor, *, max_tokens: int = 9) -> StandardRows:
    x, weights = torch.ones(len(ids), 4), torch.ones(ids.shape)
    rows = part.prepare(x, ids, weights, max_tokens_per_rank=max_tokens, router_weight_on_input=False).rows
    assert isinstance(rows, StandardRows)
    return rows


@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
def test_outputs_of_all_ranks_add_up_to_the_layer(scattered: bool) -> None:
    case = Case("", tokens=(7, 7, 7), G=8, K=3, absent=0.2, scattered=scattered)
    batch, weights = make_batch(case, 0, torch.float32), make_weights(case, torch.float32)
    total = torch.zeros(batch.x.shape)
    for rank in range(case.num_ranks):
        part = LocalPrepareAndFinalize(placement=case.placement, rank=rank, device=CPU)
        assert not part.output_is_reduced
        kernel = ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU))
        total += kernel.apply(
            batch.x, batch.topk_ids, batch.topk_weights, of_rank(weights, case.placement, rank), max_tokens_per_rank=7
        )
    assert torch.allclose(total.double(), right_answer(case, 0, torch.float32), atol=1e-5)


def test_over_one_rank_everything_passes_as_it_is() -> None:
    ids = torch.tensor([[0, -1], [3, 2]])
    rows = rows_of(LocalPrepareAndFinalize(placement=ExpertPlacement.linear(4, 1), rank=0, device=CPU), ids)
    assert rows.topk_ids is ids


def test_id_of_minus_one_does_not_wrap_to_the_last_expert() -> None:
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(4, 2), rank=1, device=CPU)
    assert rows_of(part, torch.tensor([[-1, 2, 3, 0]])).topk_ids.tolist() == [[-1, 0, 1, -1]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_id_past_the_end_of_the_expert_map_is_refused(ranks: int) -> None:
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(4, ranks), rank=0, device=CPU)
    with pytest.raises(ExpertIdError, match="local, rank 0: topk_ids names expert 4, the layer has experts 0 to 3"):
        rows_of(part, torch.tensor([[0], [4]]))


def test_more_tokens_than_announced_are_refused() -> None:
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(4, 1), rank=0, device=CPU)
    with pytest.raises(CapacityError, match="2 tokens in a step announced as at most 1 per rank"):
        rows_of(part, torch.tensor([[0], [1]]), max_tokens=1)


def test_rank_outside_of_the_placement_is_refused() -> None:
    with pytest.raises(AgreementError, match="rank 2: the experts are placed on 2 ranks"):
        LocalPrepareAndFinalize(placement=ExpertPlacement.linear(4, 2), rank=2, device=CPU)

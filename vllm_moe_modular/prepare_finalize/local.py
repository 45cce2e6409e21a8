"""No communication: this rank's experts on this rank's tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.traffic import Traffic
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.routing import check_ranks, check_step, expert_table, known_ids, local_ids_on


@dataclass(frozen=True, slots=True)
class LocalTicket:
    """There is nothing to bring home."""


class LocalPrepareAndFinalize(PrepareAndFinalize[LocalTicket]):
    """Tokens that every rank already has: each rank runs its own experts, whoever replicated them adds up the outputs.

    Over one rank it passes everything through as it is. Device memory: 4 bytes for every global expert.

    Args:
        placement: which rank holds which expert.
        rank: of this process, in `placement`.
        device: of the activations.

    Raises:
        AgreementError: `placement` has no such rank.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.EXPERTS
    traffic: Traffic
    output_is_reduced: ClassVar[bool] = False
    rows_are_tokens: ClassVar[bool] = True

    def __init__(self, *, placement: ExpertPlacement, rank: int, device: torch.device) -> None:
        check_ranks(placement, num_ranks=placement.num_ranks, rank=rank)
        self._placement = placement
        self._rank = rank
        here = local_ids_on(placement, rank)
        self._local_id_G = expert_table(here, device)
        self._keeps_ids = here == list(range(placement.num_experts))
        self.traffic = Traffic(placement.num_ranks)

    @classmethod
    def build(cls, context: BuildContext) -> "LocalPrepareAndFinalize":
        """For layers with this placement."""
        return cls(placement=context.placement, rank=context.rank, device=context.device)

    def most_rows(self, max_tokens_per_rank: int) -> int:
        """This rank's own tokens."""
        return max_tokens_per_rank

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,  # noqa: ARG002 - the experts weight
    ) -> Dispatched[LocalTicket]:
        """See `PrepareAndFinalize.prepare`.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`.
            ExpertIdError: on the CPU, an id past the last expert; elsewhere the experts leave it out, as they do -1.
        """
        G = self._placement.num_experts
        check_step(topk_ids_TK, num_experts=G, max_tokens_per_rank=max_tokens_per_rank, rank=self._rank, part="local")
        own = [x_TH.shape[0] if rank == self._rank else 0 for rank in range(self._placement.num_ranks)]
        self.traffic.add(sent=own, received=own)
        ids_TK = topk_ids_TK if self._keeps_ids else self._local_id_G[known_ids(topk_ids_TK, G)]
        return Dispatched(StandardRows(x_TH, ids_TK, topk_weights_TK), LocalTicket())

    def finalize(self, y: torch.Tensor, ticket: LocalTicket, *, out_TH: torch.Tensor) -> None:  # noqa: ARG002
        """Copy `y`, this rank's share of the sum, if it is not there yet. See `PrepareAndFinalize.finalize`."""
        if y is not out_TH:
            out_TH.copy_(y)

"""A ragged all-to-all over torch.distributed: gloo on a CPU, NCCL on GPUs.

Letters: T tokens of this rank, K top-k, H hidden, S rows sent to other ranks, N rows received from them, R rows for the
experts (N, then this rank's own), G global experts, W ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import ShapeError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup, Wait
from vllm_moe_modular.modular.traffic import Traffic
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.routing import (
    accumulation_dtype,
    check_ranks,
    check_step,
    expert_table,
    known_ids,
    pack_routing,
    unpack_routing,
)


@dataclass(frozen=True, slots=True)
class TorchTicket:
    """Where the rows of a dispatch came from.

    Attributes:
        tokens_of_rank: [W] of [rows], the tokens that have experts on each rank, ascending.
        sent, received: [W], rows to and from each rank over the network: 0 for this one.
    """

    tokens_of_rank: tuple[torch.Tensor, ...]
    sent: list[int]
    received: list[int]


class TorchPrepareAndFinalize(PrepareAndFinalize[TorchTicket]):
    """Each token crosses to a rank once, however many of its experts live there, and one partial sum comes back.

    A dispatch is three steps of the group: row counts; rows; local expert ids with weights. A combine is one. The host
    needs the counts, so this cannot be captured in a CUDA graph. The partial sums of a token are added in float32
    (float64 for float64) in the order of the ranks, and rounded once: the result does not depend on timing.

    Device memory: 8 bytes for every global expert; the rows of a step are allocated in it.

    Args:
        group: the expert-parallel group.
        placement: which of its ranks holds which expert.
        device: of the activations.

    Raises:
        AgreementError: `placement` and `group` are not over the same number of ranks.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.EXPERTS
    traffic: Traffic
    supports_async: ClassVar[bool] = True

    def __init__(self, *, group: RankGroup, placement: ExpertPlacement, device: torch.device) -> None:
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        self._group = group
        self._num_experts = placement.num_experts
        self._rank_of_G = expert_table(placement.rank_of, device)
        self._local_id_of_G = expert_table(placement.local_id_of, device)
        # Rows are laid out by this: those that travel first, in one piece.
        own_last = [*range(group.rank), *range(group.rank + 1, group.size), group.rank]
        self._ranks_W = torch.tensor(own_last, device=device)
        self._place_of_rank_W = self._ranks_W.argsort()
        self.traffic = Traffic(group.size)

    @classmethod
    def build(cls, context: BuildContext) -> "TorchPrepareAndFinalize":
        """For layers with this placement."""
        return cls(group=context.require_group(), placement=context.placement, device=context.device)

    def most_rows(self, max_tokens_per_rank: int) -> int:
        """All tokens of all ranks, should each have an expert here."""
        return self._group.size * max_tokens_per_rank

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,  # noqa: ARG002 - the experts weight
    ) -> Dispatched[TorchTicket]:
        """See `PrepareAndFinalize.prepare`. The rows of other ranks come first, in the order of ranks.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`, before anything is sent.
            ExpertIdError: on the CPU, an id past the last expert, before anything is sent; elsewhere it counts as -1.
            RankLostError: a rank did not take part in time.
        """
        G, me = self._num_experts, self._group.rank
        check_step(topk_ids_TK, num_experts=G, max_tokens_per_rank=max_tokens_per_rank, rank=me, part="torch")
        ids_TK = known_ids(topk_ids_TK, G)
        rank_TK = self._rank_of_G[ids_TK]
        goes_WT = (rank_TK == self._ranks_W.view(-1, 1, 1)).any(dim=2)
        counts_W = goes_WT.sum(dim=1, dtype=torch.int32)[self._place_of_rank_W]
        sent, received = self._group.exchange_counts(counts_W, phase="dispatch counts")
        self.traffic.add(sent=sent, received=received)

        place_S, token_S = goes_WT.nonzero(as_tuple=True)
        is_there_SK = rank_TK[token_S] == self._ranks_W[place_S].unsqueeze(1)
        routing_S2K = pack_routing(
            torch.where(is_there_SK, self._local_id_of_G[ids_TK[token_S]], -1), topk_weights_TK[token_S]
        )
        by_place = torch.split(token_S, [*sent[:me], *sent[me + 1 :], sent[me]])
        ticket = TorchTicket(
            tokens_of_rank=(*by_place[:me], by_place[-1], *by_place[me:-1]),
            sent=_without(sent, me),
            received=_without(received, me),
        )
        x_RH, topk_ids_RK, topk_weights_RK = self._dispatch(x_TH, token_S, routing_S2K, ticket, R=sum(received))
        return Dispatched(StandardRows(x_RH, topk_ids_RK, topk_weights_RK), ticket)

    def _dispatch(
        self, x_TH: torch.Tensor, token_S: torch.Tensor, routing_S2K: torch.Tensor, ticket: TorchTicket, *, R: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Send rows and routing; this rank's own, which are the last, are copied meanwhile."""
        S, N = sum(ticket.sent), sum(ticket.received)
        # At least one row, so that the collective always has memory to point at.
        x_RH = x_TH.new_empty((max(R, 1), x_TH.shape[1]))[:R]
        routing_R2K = routing_S2K.new_empty((max(R, 1), routing_S2K.shape[1]))[:R]
        wait_for_x = self._group.all_to_all(
            x_RH[:N], x_TH[token_S[:S]], out_rows=ticket.received, in_rows=ticket.sent, phase="dispatch"
        )
        wait_for_routing = self._group.all_to_all(
            routing_R2K[:N], routing_S2K[:S], out_rows=ticket.received, in_rows=ticket.sent, phase="dispatch routing"
        )
        torch.index_select(x_TH, 0, token_S[S:], out=x_RH[N:])
        routing_R2K[N:] = routing_S2K[S:]
        wait_for_x()
        wait_for_routing()
        return x_RH, *unpack_routing(routing_R2K)

    def finalize(self, y: torch.Tensor, ticket: TorchTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`.

        Raises:
            ShapeError: `y` has not one row per dispatched row.
            RankLostError: a rank did not take part in time.
        """
        self.finalize_async(y, ticket, out_TH=out_TH)()

    def finalize_async(self, y: torch.Tensor, ticket: TorchTicket, *, out_TH: torch.Tensor) -> Wait:
        """Send the rows on their way home; see `finalize`."""
        me, H = self._group.rank, out_TH.shape[1]
        S, N = sum(ticket.sent), sum(ticket.received)
        R = N + len(ticket.tokens_of_rank[me])
        if y.shape != (R, H):
            raise ShapeError("y", want=("R", "H"), values={"R": R, "H": H}, got=y.shape)
        y = y.contiguous()
        home_SH = y.new_empty((max(S, 1), H))[:S]
        wait = self._group.all_to_all(home_SH, y[:N], out_rows=ticket.sent, in_rows=ticket.received, phase="combine")

        def finish() -> None:
            wait()
            parts = list(torch.split(home_SH, ticket.sent))
            parts[me] = y[N:]
            _add_up(parts, ticket.tokens_of_rank, out_TH)

        return finish


def _add_up(parts: Sequence[torch.Tensor], tokens_of_rank: Sequence[torch.Tensor], out_TH: torch.Tensor) -> None:
    """Write the sum of every rank's rows, rank 0 first; a token occurs at most once per rank."""
    accumulate = accumulation_dtype(out_TH.dtype)
    sum_TH = torch.zeros_like(out_TH, dtype=accumulate) if out_TH.dtype != accumulate else out_TH.zero_()
    for tokens, rows in zip(tokens_of_rank, parts, strict=True):
        sum_TH.index_add_(0, tokens, rows.to(accumulate))
    if sum_TH is not out_TH:
        out_TH.copy_(sum_TH)


def _without(counts: Sequence[int], rank: int) -> list[int]:
    """`counts` with 0 for `rank`."""
    return [0 if r == rank else count for r, count in enumerate(counts)]

"""All tokens to all ranks, partial sums back: two all-gathers and one reduce-scatter.

Letters: T tokens of this rank, M rows per rank, K top-k, H hidden, G global experts, W ranks.
"""

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
    local_ids_on,
    pack_routing,
    unpack_routing,
)


@dataclass(frozen=True, slots=True)
class AllGatherTicket:
    """How the rows of a dispatch were padded.

    Attributes:
        rows_per_rank: M, the same on every rank.
    """

    rows_per_rank: int


class AllGatherPrepareAndFinalize(PrepareAndFinalize[AllGatherTicket]):
    """Every rank sees the tokens of all ranks, padded to the largest number that any of them has, and skips what is not
    for its experts.

    No counts are exchanged, so the host need not wait. Padding rows have no expert, and their contents are never read.
    The partial sums of a token are added in float32 (float64 for float64) in the order of the ranks, and rounded once:
    an all-to-all and a sum rather than a reduce-scatter, which moves as many bytes and adds in the rows' own dtype.

    Device memory: 4 bytes for every global expert; the rows of a step are allocated in it.

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
        self._local_id_of_G = expert_table(local_ids_on(placement, group.rank), device)
        self.traffic = Traffic(group.size)

    @classmethod
    def build(cls, context: BuildContext) -> "AllGatherPrepareAndFinalize":
        """For layers with this placement."""
        return cls(group=context.require_group(), placement=context.placement, device=context.device)

    def most_rows(self, max_tokens_per_rank: int) -> int:
        """All tokens of all ranks, padded."""
        return self._group.size * max(max_tokens_per_rank, 1)

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,  # noqa: ARG002 - the experts weight
    ) -> Dispatched[AllGatherTicket]:
        """See `PrepareAndFinalize.prepare`. [W * M] rows, those of rank 0 first.

        Args:
            max_tokens_per_rank: M where it is not 0. If ranks give different numbers they hang or mix up rows.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`, before anything is sent.
            ExpertIdError: on the CPU, an id past the last expert, before anything is sent; elsewhere it counts as -1.
            RankLostError: a rank did not take part in time.
        """
        G, W, me = self._num_experts, self._group.size, self._group.rank
        check_step(topk_ids_TK, num_experts=G, max_tokens_per_rank=max_tokens_per_rank, rank=me, part="allgather")
        M = max(max_tokens_per_rank, 1)
        self.traffic.add(sent=[M] * W, received=[M] * W)
        routing_T2K = pack_routing(known_ids(topk_ids_TK, G), topk_weights_TK)
        x_MH, routing_M2K = _padded(x_TH, M), _padded(routing_T2K, M)
        routing_M2K[x_TH.shape[0] :] = G
        x_WMH = x_TH.new_empty((W, *x_MH.shape))
        routing_WM2K = routing_M2K.new_empty((W, *routing_M2K.shape))
        wait_for_x = self._group.all_gather(x_WMH, x_MH, phase="dispatch")
        wait_for_routing = self._group.all_gather(routing_WM2K, routing_M2K, phase="dispatch routing")
        wait_for_x()
        wait_for_routing()
        ids_RK, weights_RK = unpack_routing(routing_WM2K.flatten(0, 1))
        rows = StandardRows(x_WMH.flatten(0, 1), self._local_id_of_G[ids_RK], weights_RK)
        return Dispatched(rows, AllGatherTicket(rows_per_rank=M))

    def finalize(self, y: torch.Tensor, ticket: AllGatherTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`.

        Raises:
            ShapeError: `y` has not one row per gathered row.
            RankLostError: a rank did not take part in time.
        """
        self.finalize_async(y, ticket, out_TH=out_TH)()

    def finalize_async(self, y: torch.Tensor, ticket: AllGatherTicket, *, out_TH: torch.Tensor) -> Wait:
        """Send the partial sums on their way home; see `finalize`."""
        W, M, (T, H) = self._group.size, ticket.rows_per_rank, out_TH.shape
        if y.shape != (W * M, H):
            raise ShapeError("y", want=("R", "H"), values={"R": W * M, "H": H}, got=y.shape)
        home_WMH = y.new_empty((W, M, H))
        wait = self._group.all_to_all(
            home_WMH.flatten(0, 1), y.contiguous(), out_rows=[M] * W, in_rows=[M] * W, phase="combine"
        )

        def finish() -> None:
            wait()
            sum_TH = home_WMH[0, :T].to(accumulation_dtype(out_TH.dtype))
            for rank in range(1, W):
                sum_TH += home_WMH[rank, :T]
            out_TH.copy_(sum_TH)

        return finish


def _padded(rows: torch.Tensor, M: int) -> torch.Tensor:
    """`rows` with uninitialised ones after them, M in all; contiguous."""
    if rows.shape[0] == M:
        return rows.contiguous()
    padded = rows.new_empty((M, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded

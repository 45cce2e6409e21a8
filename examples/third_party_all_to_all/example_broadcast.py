"""An all-to-all of your own: every rank's tokens go to every rank, and each rank adds up what comes back.

    pip install ./examples/third_party_all_to_all
    VLLM_MOE_MODULAR=1 VLLM_MOE_MODULAR_ALL2ALL=example_broadcast vllm serve MODEL -dp 2 --enable-expert-parallel

Letters: T tokens of this rank, R tokens of all ranks, K top-k, H hidden, G global experts, W ranks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.traffic import Traffic
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.selection.checks import no_cuda_graph
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind


def has_peers(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """A check: None, or one sentence with the remedy, for people."""
    if problem.ep_size > 1:
        return None
    return "one rank has no other to send to; pass --enable-expert-parallel"


PART = Part(
    name="example_broadcast",
    kind=PartKind.PREPARE_FINALIZE,
    target="example_broadcast:BroadcastPrepareAndFinalize",
    activation_format=ActivationFormat.STANDARD,
    reduces=frozenset({"experts"}),
    preference=1000,  # suggested after all others; `auto` takes no part of another package
    summary="every rank's tokens to every rank, unpadded; an example",
    checks=(has_peers, no_cuda_graph("the host reads how many rows arrive")),
)


@dataclass(frozen=True, slots=True)
class BroadcastTicket:
    """What finalize has to know of its prepare; the object itself keeps nothing between the two."""

    rows_per_rank: list[int]


class BroadcastPrepareAndFinalize(PrepareAndFinalize[BroadcastTicket]):
    """The contract is in the docstrings of `PrepareAndFinalize`."""

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.EXPERTS

    def __init__(self, context: BuildContext) -> None:
        self._group = context.require_group()
        place = zip(context.placement.rank_of, context.placement.local_id_of, strict=True)
        here = [local if rank == context.rank else -1 for rank, local in place]
        self._local_id_of_G = torch.tensor(here, dtype=torch.int32, device=context.device)
        self.traffic = Traffic(self._group.size)

    @classmethod
    def build(cls, context: BuildContext) -> "BroadcastPrepareAndFinalize":
        return cls(context)

    def most_rows(self, max_tokens_per_rank: int) -> int:
        return self._group.size * max_tokens_per_rank

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,  # noqa: ARG002 - rows are allocated in the step
        router_weight_on_input: bool,  # noqa: ARG002 - the experts weight
    ) -> Dispatched[BroadcastTicket]:
        W, T = self._group.size, x_TH.shape[0]
        counts_W = torch.full((W,), T, dtype=torch.int32, device=x_TH.device)
        sent_W, rows_W = self._group.exchange_counts(counts_W, phase="broadcast counts")
        self.traffic.add(sent=sent_W, received=rows_W)
        x_RH = self._to_everyone(x_TH, rows_W, "broadcast tokens")
        ids_RK = self._to_everyone(topk_ids_TK.long(), rows_W, "broadcast ids")
        weights_RK = self._to_everyone(topk_weights_TK, rows_W, "broadcast weights")
        known_RK = (ids_RK >= 0) & (ids_RK < len(self._local_id_of_G))  # -1 is no expert; never index with it
        local_RK = torch.where(known_RK, self._local_id_of_G[ids_RK * known_RK], -1)
        return Dispatched(StandardRows(x_RH, local_RK, weights_RK), BroadcastTicket(rows_W))

    def finalize(self, y: torch.Tensor, ticket: BroadcastTicket, *, out_TH: torch.Tensor) -> None:
        W, (T, H) = self._group.size, out_TH.shape
        home_WTH = y.new_empty((W, T, H))
        out_rows = [T] * W
        self._group.all_to_all(
            home_WTH.flatten(0, 1), y.contiguous(), out_rows=out_rows, in_rows=ticket.rows_per_rank, phase="combine"
        )()
        out_TH.copy_(home_WTH.sum(0))

    def _to_everyone(self, rows: torch.Tensor, rows_W: list[int], phase: str) -> torch.Tensor:
        W = self._group.size
        out = rows.new_empty((sum(rows_W), *rows.shape[1:]))
        self._group.all_to_all(out, rows.repeat(W, 1), out_rows=rows_W, in_rows=[rows.shape[0]] * W, phase=phase)()
        return out

"""Parts with one fault each, over parts that have none. Importable by name on ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import Dispatched, Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import TorchTopKWeightAndReduce, WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec
from vllm_moe_modular.prepare_finalize.allgather import AllGatherPrepareAndFinalize
from vllm_moe_modular.prepare_finalize.torch_all_to_all import TorchPrepareAndFinalize
from vllm_moe_modular.reference.quantize_fp8 import quantize_fp8


class WeighsAtHome(AllGatherPrepareAndFinalize):
    """No fault: an all-gather whose finalize weights and reduces, with the router's own ids."""

    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.FINALIZE

    @dataclass(frozen=True)
    class Ticket:
        inner: Any
        topk_ids: torch.Tensor
        topk_weights: torch.Tensor
        local_ids: torch.Tensor
        router_weight_on_input: bool

    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, *, max_tokens_per_rank, router_weight_on_input):  # type: ignore[no-untyped-def]
        x = x_TH
        if router_weight_on_input:
            x = torch.where(topk_ids_TK >= 0, x_TH * topk_weights_TK, 0.0).to(x_TH.dtype)
        there = super().prepare(
            x, topk_ids_TK, topk_weights_TK,
            max_tokens_per_rank=max_tokens_per_rank, router_weight_on_input=router_weight_on_input,
        )  # fmt: skip
        assert isinstance(there.rows, StandardRows)
        ticket = self.Ticket(there.ticket, topk_ids_TK, topk_weights_TK, there.rows.topk_ids, router_weight_on_input)
        return Dispatched(there.rows, ticket)

    def finalize_async(self, y, ticket, *, out_TH):  # type: ignore[no-untyped-def]
        (T, H), K = out_TH.shape, ticket.topk_ids.shape[1]
        y = torch.where(ticket.local_ids.unsqueeze(-1) >= 0, y, 0.0)
        home = out_TH.new_empty((T, K * H))
        super().finalize_async(y.flatten(1), ticket.inner, out_TH=home)()
        TorchTopKWeightAndReduce().apply(
            home.view(T, K, H), self.ids_to_sum(ticket), ticket.topk_weights,
            router_weight_on_input=ticket.router_weight_on_input, out_RH=out_TH,
        )  # fmt: skip
        return lambda: None

    def ids_to_sum(self, ticket: Any) -> torch.Tensor:
        return ticket.topk_ids


class SendsFp8(AllGatherPrepareAndFinalize):
    """No fault: an all-gather of quantised rows, where the experts take them."""

    @classmethod
    def build(cls, context: BuildContext) -> "SendsFp8":
        part = cls(group=context.require_group(), placement=context.placement, device=context.device)
        part.in_fp8 = context.fp8_rows
        return part

    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        if not self.in_fp8:
            return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)
        values, scales = quantize_fp8(x_TH)
        there = super().prepare(
            torch.cat((values.view(torch.float32), scales), dim=1), topk_ids_TK, topk_weights_TK, **more
        )
        assert isinstance(there.rows, StandardRows)
        packed_values, scales = there.rows.x.split([values.shape[1] // 4, scales.shape[1]], dim=1)
        values = packed_values.contiguous().view(torch.float8_e4m3fn)
        return Dispatched(replace(there.rows, x=values, x_scale=self.scales_of(scales)), there.ticket)

    def scales_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


class MixesScales(SendsFp8):
    def scales_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.flip(1)


class SendsFp8Unasked(SendsFp8):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        self.in_fp8 = x_TH.shape[1] % 128 == 0
        return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)


class UsesDispatchedIds(WeighsAtHome):
    def ids_to_sum(self, ticket: Any) -> torch.Tensor:
        start = self._group.rank * ticket.inner.rows_per_rank
        return ticket.local_ids[start : start + len(ticket.topk_ids)]


class StaysAwayWithoutTokens(TorchPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        if len(x_TH) == 0:
            return Dispatched(StandardRows(x_TH, topk_ids_TK, topk_weights_TK), None)
        return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)

    def finalize_async(self, y, ticket, *, out_TH):  # type: ignore[no-untyped-def]
        return (lambda: None) if ticket is None else super().finalize_async(y, ticket, out_TH=out_TH)


class WeighsTwice(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        there = super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)
        return Dispatched(there.rows, (there.ticket, torch.where(topk_ids_TK >= 0, topk_weights_TK, 0.0)))

    def finalize_async(self, y, ticket, *, out_TH):  # type: ignore[no-untyped-def]
        inner, weights = ticket
        super().finalize_async(y, inner, out_TH=out_TH)()
        out_TH.mul_(weights.sum(dim=1, keepdim=True))
        return lambda: None


class ReadsTheExpertMapAtMinusOne(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        wrapped = torch.where(topk_ids_TK < 0, self._num_experts + topk_ids_TK, topk_ids_TK)
        return super().prepare(x_TH, wrapped, topk_weights_TK, **more)


class LeavesTokensWithoutExpertsUnwritten(TorchPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        there = super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)
        return Dispatched(there.rows, (there.ticket, (topk_ids_TK >= 0).any(dim=1)))

    def finalize_async(self, y, ticket, *, out_TH):  # type: ignore[no-untyped-def]
        inner, has_experts = ticket
        whole = torch.empty_like(out_TH)
        super().finalize_async(y, inner, out_TH=whole)()
        out_TH[has_experts] = whole[has_experts]
        return lambda: None


class WritesToItsInput(TorchPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        there = super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)
        x_TH.mul_(2)  # as one that scales rows in place
        return there


class NamesExpertsByGlobalIds(AllGatherPrepareAndFinalize):
    @classmethod
    def build(cls, context: BuildContext) -> "NamesExpertsByGlobalIds":
        part = cls(group=context.require_group(), placement=context.placement, device=context.device)
        everywhere = torch.arange(len(part._local_id_of_G), dtype=torch.int32, device=context.device)
        part._local_id_of_G = torch.where(part._local_id_of_G >= 0, everywhere, -1)
        return part


class MixesTickets(TorchPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        there = super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)
        self.latest = there.ticket
        return there

    def finalize_async(self, y, ticket, *, out_TH):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return super().finalize_async(y, self.latest, out_TH=out_TH)


class DropsAnExpertNamedTwice(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        same = topk_ids_TK.unsqueeze(2) == topk_ids_TK.unsqueeze(1)
        seen_before = same.tril(diagonal=-1).any(dim=2)
        return super().prepare(x_TH, topk_ids_TK.masked_fill(seen_before, -1), topk_weights_TK, **more)


class CountsExpertsInABytes(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        return super().prepare(x_TH, topk_ids_TK.to(torch.uint8).to(torch.int64), topk_weights_TK, **more)


class SendsHalfPrecision(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        return super().prepare(x_TH.to(torch.bfloat16).to(x_TH.dtype), topk_ids_TK, topk_weights_TK, **more)


class FailsOnOneRank(AllGatherPrepareAndFinalize):
    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
        if self._group.rank == 1 and len(x_TH) > 4:
            raise LookupError("no room for rank 1")
        return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)


class Experts(TorchExperts):
    """No fault; what the faulty ones change."""

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,
    ) -> torch.Tensor:
        return super().apply(
            rows, weights, workspace=workspace, weight_and_reduce_by=weight_and_reduce_by,
            router_weight_on_input=router_weight_on_input,
        )  # fmt: skip


class IgnoresRouterWeightOnInput(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        return super().apply(rows, weights, **{**more, "router_weight_on_input": False})


class MultipliesByZero(Experts):
    """Leaves nothing out: a weight of 0 stands for an expert that is not here."""

    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        here = rows.topk_ids >= 0
        everywhere = replace(rows, topk_ids=rows.topk_ids.clamp(min=0), topk_weights=rows.topk_weights * here)
        return super().apply(everywhere, weights, **more)


class CountsOnZeroedScratch(Experts):
    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:  # noqa: ARG002
        return (BufferSpec((rows.x.shape[0], 1), rows.x.dtype),)

    def apply(self, rows, weights, *, workspace, **more):  # type: ignore[no-untyped-def]
        y = super().apply(rows, weights, workspace=(), **more)
        return y + workspace[0].view(-1, *[1] * (y.dim() - 1))


class ScalesItsRowsInPlace(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        y = super().apply(rows, weights, **more)
        rows.x.mul_(0.5)
        return y


class CountsAnExpertNamedTwiceOnce(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        same = (rows.topk_ids.unsqueeze(2) == rows.topk_ids.unsqueeze(1)).tril(diagonal=-1).any(dim=2)
        return super().apply(replace(rows, topk_ids=rows.topk_ids.masked_fill(same, -1)), weights, **more)


class IgnoresScalesOfRows(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        if rows.x_scale is not None:
            rows = replace(rows, x_scale=torch.ones_like(rows.x_scale))
        return super().apply(rows, weights, **more)


class TakesScalesToLieInRows(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        if rows.x_scale is not None:
            rows = replace(rows, x_scale=rows.x_scale.as_strided(rows.x_scale.shape, (rows.x_scale.shape[1], 1)))
        return super().apply(rows, weights, **more)


class TakesEveryWeightToBeScaledAlike(Experts):
    def apply(self, rows, weights, **more):  # type: ignore[no-untyped-def]
        if weights.w13_scale is not None:
            weights = replace(weights, w13_scale=weights.w13_scale.mean().expand_as(weights.w13_scale).contiguous())
        return super().apply(rows, weights, **more)

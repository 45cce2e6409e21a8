"""pplx-kernels: rows straight into a block of their expert, over NVLink on one host and over NVSHMEM beyond.

Letters: T tokens of this rank, L tokens per rank and round, K top-k, H hidden, E experts of this rank, W ranks,
C = W * L rows of a block, G = H / 128 scales of a row in fp8.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import CapacityError, ShapeError, UnsupportedError
from vllm_moe_modular.kernels.launch import multiprocessors
from vllm_moe_modular.kernels.quantize_fp8 import rows_in_fp8
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Dispatched, PrepareAndFinalize
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.pplx_library import (
    HIDDEN_STEP,
    NAME,
    PplxBuffers,
    PplxShape,
    fp8_scales,
    pplx_buffers,
    pplx_round,
)
from vllm_moe_modular.prepare_finalize.routing import check_ranks, check_step
from vllm_moe_modular.prepare_finalize.uniform_experts import (
    UniformExperts,
    padded_blocks,
    padded_rows,
    uniform_numbers,
)


def complete_routing(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, fillers_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of which every slot of a token names an expert of its own, as the library needs it.

    A slot without an expert gets one that the token does not name, with a weight of 0; of slots that name the same
    expert the first gets the sum of their weights, and the others count as slots without.

    Args:
        ids_TK: int64; -1 = no expert.
        weights_TK: float32; may be NaN behind -1.
        fillers_K: int64, K different experts. Of them at least as many are not named as there are slots without.
    """
    K = ids_TK.shape[1]
    same_TKK = ids_TK.unsqueeze(2) == ids_TK.unsqueeze(1)
    is_absent_TK = ids_TK < 0
    is_first_TK = same_TKK.int().argmax(dim=2) == torch.arange(K, device=ids_TK.device)
    is_filled_TK = is_absent_TK | ~is_first_TK
    known_TK = torch.where(is_absent_TK, 0.0, weights_TK)
    sums_TK = torch.where(same_TKK, known_TK.unsqueeze(1), 0.0).sum(dim=2)
    is_named_TK = (ids_TK.unsqueeze(2) == fillers_K).any(dim=1)  # by filler
    free_first_TK = fillers_K[is_named_TK.int().sort(dim=1, stable=True).indices]
    nth_TK = (is_filled_TK.long().cumsum(dim=1) - 1).clamp(min=0)
    ids_TK = torch.where(is_filled_TK, free_first_TK.gather(1, nth_TK), ids_TK)
    return ids_TK, torch.where(is_filled_TK, 0.0, sums_TK)


def tokens_to_send(ids_TK: torch.Tensor) -> torch.Tensor:
    """[1] int64: how many tokens there are up to the last one that has an expert, as a batch padded for a graph ends in
    tokens without."""
    has_expert_T = (ids_TK >= 0).any(dim=1)
    ordinals_T = torch.arange(1, len(ids_TK) + 1, device=ids_TK.device)
    return torch.where(has_expert_T, ordinals_T, 0).amax(dim=0, keepdim=True)


@dataclass(frozen=True, slots=True)
class PplxTicket:
    """What combine needs.

    Attributes:
        slot: index of the buffers that the call holds until finalize.
        ids: [max(T, 1), K], uint32, as they were sent.
        weights: [max(T, 1), K], float32, of the sum at home.
        bound: [1], uint32, how many tokens were sent.
        is_empty: [T, 1], tokens that no expert is named of, of which nothing is promised.
    """

    slot: int
    ids: torch.Tensor
    weights: torch.Tensor
    bound: torch.Tensor
    is_empty: torch.Tensor


class PplxPrepareAndFinalize(PrepareAndFinalize[PplxTicket]):
    """The host never waits, so CUDA graphs capture it at every size.

    A round takes L tokens of each rank, and the composer runs a larger step in several. The library has no slot without
    an expert: where the router names none, the row goes to an expert that the token does not name, with a weight of 0;
    only tokens at the end of a batch that have no expert at all are not sent.

    To experts that take rows in fp8 it sends such where H is a multiple of 512; they come home in the layer's dtype.

    Its kernels wait for a rank without limit: with a lost one they hang until the server's own watchdog.

    Device memory: for each of two calls in flight, a row of float32 for every expert of the rank, token of a round and
    rank. The blocks of a step are allocated in it.

    Args:
        group: the expert-parallel group.
        buffers: of the layer's shape, see `pplx_buffers`.
        placement: which rank holds which expert.
        hidden: H.
        dtype, device: of the activations.

    Raises:
        AgreementError: `placement` and `group` are not over the same number of ranks.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.BATCHED
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.FINALIZE
    fills_empty_slots: ClassVar[bool] = True

    def __init__(
        self,
        *,
        group: RankGroup,
        buffers: PplxBuffers,
        placement: ExpertPlacement,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        self._group = group
        self._buffers = buffers
        self._num_experts = placement.num_experts
        self._num_local = placement.num_local[group.rank]
        self._hidden = hidden
        self._dtype = dtype
        self._experts = UniformExperts(placement, dtype=torch.int64, device=device)
        self._fillers_K = torch.tensor(uniform_numbers(placement)[: buffers.shape.top_k], device=device)
        self.tokens_per_round = buffers.shape.tokens_per_round

    @classmethod
    def build(cls, context: BuildContext) -> "PplxPrepareAndFinalize":
        """For layers with this placement; a collective if it is the first of its shape.

        Raises:
            AgreementError: the placement and the group are not over the same number of ranks.
            UnsupportedError: the library cannot be loaded or set up, or does not take the dtype.
        """
        group, placement = context.require_group(), context.placement
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        if context.dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedError(f"{context.dtype} in {NAME}", instead="it takes bfloat16 and float16")
        shape = PplxShape(
            tokens_per_round=pplx_round(
                context.low_latency_tokens, context.capacity_tokens, group.size, multiprocessors(context.device)
            ),
            hidden=-(-context.hidden // HIDDEN_STEP) * HIDDEN_STEP,
            dtype=torch.float8_e4m3fn if context.fp8_rows and fp8_scales(context.hidden) else context.dtype,
            experts=max(placement.num_local) * placement.num_ranks,
            top_k=context.top_k,
        )
        return cls(
            group=group,
            buffers=pplx_buffers(group, shape),
            placement=placement,
            hidden=context.hidden,
            dtype=context.dtype,
            device=context.device,
        )

    def most_rows(self, max_tokens_per_rank: int) -> int:  # noqa: ARG002 - a block has room for a full round
        """All tokens of a round of all ranks."""
        return self._group.size * self._buffers.shape.tokens_per_round

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,
    ) -> Dispatched[PplxTicket]:
        """See `PrepareAndFinalize.prepare`. Ids outside the experts count as -1.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`, or that more than those of a round.
            MoEModularError: two calls are in flight already.
            ShapeError: not the hidden size or the top-k that the buffers were reserved for.
            UnsupportedError: not their dtype; or the router's weight is on the input of several experts of a token.
        """
        shape, T = self._buffers.shape, x_TH.shape[0]
        check_step(
            topk_ids_TK,
            num_experts=self._num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            rank=self._group.rank,
            part=NAME,
        )
        if max_tokens_per_rank > shape.tokens_per_round:
            raise CapacityError(
                f"{NAME}, rank {self._group.rank}: {max_tokens_per_rank} tokens per rank in one round of at most "
                f"{shape.tokens_per_round}; run it in a ModularKernel, which makes several rounds of them"
            )
        self._check("x_TH", x_TH, (T, self._hidden))
        for name, t in (("topk_ids_TK", topk_ids_TK), ("topk_weights_TK", topk_weights_TK)):
            if t.shape != (T, shape.top_k):
                raise ShapeError(name, want=("T", "K"), values={"T": T, "K": shape.top_k}, got=t.shape)
        if router_weight_on_input:
            if shape.top_k != 1:
                raise UnsupportedError(
                    f"the router's weight on the input of the {shape.top_k} experts of a token in {NAME}, which sends "
                    "one row for all of them",
                    instead="choose an all-to-all whose experts weight",
                )
            x_TH, topk_weights_TK = (x_TH * topk_weights_TK).to(x_TH.dtype), torch.ones_like(topk_weights_TK)
        if T == 0:
            topk_ids_TK = topk_ids_TK.new_full((1, shape.top_k), -1)
            topk_weights_TK = topk_weights_TK.new_zeros((1, shape.top_k))
        known_TK = self._experts.ids(topk_ids_TK)
        ids_TK, weights_TK = complete_routing(known_TK, topk_weights_TK, self._fillers_K)
        ids_TK, weights_TK = ids_TK.to(torch.uint32), weights_TK.contiguous()
        bound = tokens_to_send(known_TK).to(torch.uint32)
        is_empty = (known_TK < 0).all(dim=1, keepdim=True)
        ticket = PplxTicket(
            slot=self._buffers.take(), ids=ids_TK, weights=weights_TK, bound=bound, is_empty=is_empty[:T]
        )
        try:
            return Dispatched(self._dispatch(padded_rows(x_TH, shape.hidden, least_rows=1), ticket), ticket)
        except BaseException:
            self._buffers.give_back(ticket.slot)
            raise

    def _dispatch(self, x: torch.Tensor, ticket: PplxTicket) -> BatchedRows:
        shape, W = self._buffers.shape, self._group.size
        E, C, here = self._experts.per_rank, W * shape.tokens_per_round, self._num_local
        values, scales = rows_in_fp8(x) if shape.scales else (x, None)
        x_ECH = values.new_empty((E, C, shape.hidden))
        scale_ECG = None if scales is None else scales.new_empty((E, C, shape.scales))
        counts_E = torch.empty(E, dtype=torch.int32, device=x.device)
        self._buffers.transports[ticket.slot].dispatch(
            out_expert_num_tokens=counts_E,
            out_expert_x=x_ECH,
            out_expert_x_scale=scale_ECG,
            dp_x=values,
            dp_x_scale=scales,
            indices=ticket.ids,
            bound_m=ticket.bound,
        )
        return BatchedRows(
            x_ECH[:here, :, : self._hidden], counts_E[:here], x_scale=None if scale_ECG is None else scale_ECG[:here]
        )

    def finalize(self, y: torch.Tensor, ticket: PplxTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`. The buffers are free then, also if it fails, but for a wrong `y`.

        Raises:
            MoEModularError: the ticket was finalized already.
            ShapeError: `y` has not the shape of the blocks.
            UnsupportedError: not in the dtype of the buffers.
        """
        shape, (T, H) = self._buffers.shape, out_TH.shape
        self._check("y", y, (self._num_local, self._group.size * shape.tokens_per_round, self._hidden))
        self._buffers.require_taken(ticket.slot)
        fits = (ticket.ids.shape[0], shape.hidden) == (T, H) and out_TH.is_contiguous()
        try:
            home = out_TH if fits else out_TH.new_empty((ticket.ids.shape[0], shape.hidden))
            home.zero_()  # tokens that were not sent
            self._buffers.transports[ticket.slot].combine(
                out_tokens=home,
                indices=ticket.ids,
                weights=ticket.weights,
                expert_y=padded_blocks(y, self._experts.per_rank, shape.hidden),
                bound_m=ticket.bound,
            )
        finally:
            self._buffers.give_back(ticket.slot)
        if not fits:
            out_TH.copy_(home[:T, :H])
        out_TH.masked_fill_(ticket.is_empty, 0)  # a weight of 0 on NaN is NaN

    def _check(self, name: str, t: torch.Tensor, want: tuple[int, ...]) -> None:
        """The kernels trust the shape that the buffers were reserved for."""
        if t.shape != want:
            letters = ("rows", "H") if len(want) == 2 else ("E", "C", "H")
            raise ShapeError(name, want=letters, values=dict(zip(letters, want, strict=True)), got=t.shape)
        if t.dtype != self._dtype:
            raise UnsupportedError(f"{name} in {t.dtype} in {NAME}", instead=f"the layer is in {self._dtype}")

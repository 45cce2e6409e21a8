"""DeepEP's low-latency kernels: every row goes straight into a block of its expert, and is weighted at home.

Letters: T tokens of this rank, L tokens per rank and round, K top-k, H hidden, E experts of this rank, W ranks,
C = W * L rows of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import CapacityError, ShapeError, UnsupportedError
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Dispatched, PrepareAndFinalize
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.deepep_library import (
    LowLatencyBuffer,
    LowLatencyShape,
    load_deepep,
    low_latency_buffer,
    low_latency_hidden,
    low_latency_round,
    require_low_latency,
    sends_fp8,
    topk_ids_dtype,
)
from vllm_moe_modular.prepare_finalize.routing import check_ranks, check_step
from vllm_moe_modular.prepare_finalize.uniform_experts import UniformExperts, padded_blocks, padded_rows

NAME = "deepep_low_latency"


@dataclass(frozen=True, slots=True)
class LowLatencyTicket:
    """How a dispatch went.

    Attributes:
        handle: the library's.
        ids: [max(T, 1), K], as they were sent.
        weights: [max(T, 1), K], float32, of the sum at home.
    """

    handle: Any
    ids: torch.Tensor
    weights: torch.Tensor


class DeepEPLowLatencyPrepareAndFinalize(PrepareAndFinalize[LowLatencyTicket]):
    """The host never waits, so CUDA graphs capture it at every size.

    A round takes L tokens of each rank, and the composer runs a larger step in several: the blocks are those of one
    round, [E, W * L, H], however many tokens a step has. The sum over top-k is made in float32 in the order of the
    slots: the same result at every run, though the rows of a block come in any order. Columns are rounded up to the
    next size that the library was compiled for. With `finalize_async` the rows are received only when its result is
    called, or when the next call begins.

    A rank that stays away ends a wait on the device after 100 s, which are compiled into the library, with an error of
    CUDA.

    Device memory: twice the largest message of every expert and token of a round, as the library hints; 4 bytes for
    every global expert. The blocks of a step are allocated in it.

    Args:
        group: the expert-parallel group.
        buffer: of the layer's shape, see `low_latency_buffer`.
        placement: which rank holds which expert.
        hidden: H.
        device: of the activations.
        fp8: the library may send rows as float8_e4m3fn with a scale for every 128 columns; they come home in bfloat16.
            It does where H is a size that it was compiled for; rows of other sizes go out in bfloat16, since columns
            that are added would leave rows that are not contiguous, which experts refuse in fp8.

    Raises:
        AgreementError: `placement` and `group` are not over the same number of ranks.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.BATCHED
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.FINALIZE
    supports_async: ClassVar[bool] = True

    def __init__(
        self,
        *,
        group: RankGroup,
        buffer: LowLatencyBuffer,
        placement: ExpertPlacement,
        hidden: int,
        device: torch.device,
        fp8: bool = False,
    ) -> None:
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        self._group = group
        self._buffer = buffer
        self._num_experts = placement.num_experts
        self._num_local = placement.num_local[group.rank]
        self._hidden = hidden
        self._fp8 = sends_fp8(hidden, wire_hidden=buffer.shape.hidden, fp8_rows=fp8)
        self._experts = UniformExperts(placement, dtype=topk_ids_dtype(load_deepep()), device=device)
        self.tokens_per_round = buffer.shape.tokens_per_round

    @classmethod
    def build(cls, context: BuildContext) -> "DeepEPLowLatencyPrepareAndFinalize":
        """For layers with this placement; a collective if it is the first of its shape.

        Raises:
            AgreementError: the placement and the group are not over the same number of ranks.
            UnsupportedError: the library does not take so many ranks, columns or experts of a token, or cannot start.
        """
        group, placement = context.require_group(), context.placement
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        require_low_latency(ranks=group.size, top_k=context.top_k)
        if context.dtype != torch.bfloat16:
            raise UnsupportedError(f"{context.dtype} in {NAME}", instead="it takes bfloat16; pass --dtype bfloat16")
        shape = LowLatencyShape(
            tokens_per_round=low_latency_round(context.low_latency_tokens, context.capacity_tokens, group.size),
            hidden=low_latency_hidden(context.hidden),
            experts=max(placement.num_local) * placement.num_ranks,
        )

        def made(buffer: LowLatencyBuffer) -> "DeepEPLowLatencyPrepareAndFinalize":
            return cls(
                group=group,
                buffer=buffer,
                placement=placement,
                hidden=context.hidden,
                device=context.device,
                fp8=context.fp8_rows,
            )

        return made(low_latency_buffer(group, shape, warm_up=lambda new: made(new)._run_once(context.top_k)))

    def _run_once(self, top_k: int) -> None:
        """Every kernel, as a rank without tokens runs it."""
        device = self._experts.device
        x = torch.zeros((0, self._hidden), dtype=torch.bfloat16, device=device)
        ids = torch.zeros((0, top_k), dtype=torch.int64, device=device)
        for asynchronous in (False, True):
            done = self.prepare(x, ids, ids.float(), max_tokens_per_rank=0, router_weight_on_input=False)
            assert isinstance(done.rows, BatchedRows), "this part delivers blocks"
            y, out = torch.zeros_like(done.rows.x, dtype=x.dtype), torch.zeros_like(x)
            if asynchronous:
                self.finalize_async(y, done.ticket, out_TH=out)()
            else:
                self.finalize(y, done.ticket, out_TH=out)

    def most_rows(self, max_tokens_per_rank: int) -> int:  # noqa: ARG002 - a block has room for a full round
        """All tokens of a round of all ranks."""
        return self._group.size * self._buffer.shape.tokens_per_round

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,
    ) -> Dispatched[LowLatencyTicket]:
        """See `PrepareAndFinalize.prepare`. Ids outside the experts count as -1.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`, or that more than those of a round.
            ShapeError: not the layer's hidden size.
            UnsupportedError: not in bfloat16; or the router's weight is on the input of several experts of a token.
        """
        shape = self._buffer.shape
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
        self._check("x_TH", x_TH, (x_TH.shape[0], self._hidden))
        if router_weight_on_input:
            x_TH, topk_weights_TK = _weighted(x_TH, topk_weights_TK)
        x, ids, weights = self._to_send(x_TH, topk_ids_TK, topk_weights_TK)
        self._buffer.settle()
        received, counts_E, handle, _, _ = self._buffer.buffer.low_latency_dispatch(
            x, ids, shape.tokens_per_round, shape.experts, use_fp8=self._fp8
        )
        E, H = self._num_local, self._hidden
        x_ECH, scale_ECG = received if self._fp8 else (received, None)
        if scale_ECG is not None:
            scale_ECG = scale_ECG[:E, :, : -(-H // GROUP)]
        rows = BatchedRows(x_ECH[:E, :, :H], counts_E[:E], x_scale=scale_ECG)
        return Dispatched(rows, LowLatencyTicket(handle, ids, weights))

    def _to_send(
        self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A rank without tokens brings one that goes nowhere, so that no pointer is null."""
        x = padded_rows(x_TH, self._buffer.shape.hidden, least_rows=1)
        if x_TH.shape[0] > 0:
            return x, self._experts.ids(topk_ids_TK), topk_weights_TK.contiguous()
        nowhere = topk_ids_TK.new_full((1, topk_ids_TK.shape[1]), -1)
        return x, self._experts.ids(nowhere), topk_weights_TK.new_zeros(nowhere.shape)

    def finalize(self, y: torch.Tensor, ticket: LowLatencyTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`.

        Raises:
            ShapeError: `y` has not the shape of the blocks.
            UnsupportedError: not in bfloat16.
        """
        home, _ = self._combine(y, ticket, out_TH, later=False)
        self._take_home(home, out_TH)

    def finalize_async(self, y: torch.Tensor, ticket: LowLatencyTicket, *, out_TH: torch.Tensor) -> Callable[[], None]:
        """Send the rows home; see `finalize`."""
        home, receive = self._combine(y, ticket, out_TH, later=True)
        settle = self._buffer.sent_off(receive)

        def finish() -> None:
            settle()
            self._take_home(home, out_TH)

        return finish

    def _combine(
        self, y: torch.Tensor, ticket: LowLatencyTicket, out_TH: torch.Tensor, *, later: bool
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Where the rows will be once they are received, and how to receive them if that was left for later."""
        shape = self._buffer.shape
        self._check("y", y, (self._num_local, self._group.size * shape.tokens_per_round, self._hidden))
        fits = out_TH.shape == (ticket.ids.shape[0], shape.hidden) and out_TH.is_contiguous()
        self._buffer.settle()
        home, _, receive = self._buffer.buffer.low_latency_combine(
            padded_blocks(y, self._experts.per_rank, shape.hidden),
            ticket.ids,
            ticket.weights,
            ticket.handle,
            return_recv_hook=later,
            out=out_TH if fits else None,
        )
        return home, receive

    def _take_home(self, home: torch.Tensor, out_TH: torch.Tensor) -> None:
        """Copy what did not come straight into `out_TH`."""
        T, H = out_TH.shape
        if home.data_ptr() != out_TH.data_ptr():
            out_TH.copy_(home[:T, :H])

    def _check(self, name: str, t: torch.Tensor, want: tuple[int, ...]) -> None:
        """The kernels trust the shape that the buffer was laid out by."""
        if t.shape != want:
            letters = ("rows", "H") if len(want) == 2 else ("E", "C", "H")
            raise ShapeError(name, want=letters, values=dict(zip(letters, want, strict=True)), got=t.shape)
        if t.dtype != torch.bfloat16:
            raise UnsupportedError(f"{name} in {t.dtype} in {NAME}", instead="it moves bfloat16")


def _weighted(x_TH: torch.Tensor, topk_weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens times their one weight, and weights of 1 for the sum at home."""
    if topk_weights_TK.shape[1] != 1:
        raise UnsupportedError(
            f"the router's weight on the input of the {topk_weights_TK.shape[1]} experts of a token in {NAME}, which "
            "sends one row for all of them",
            instead="choose an all-to-all whose experts weight",
        )
    return (x_TH * topk_weights_TK).to(x_TH.dtype), torch.ones_like(topk_weights_TK)

"""Prepare and finalize: the two halves of one all-to-all, and the ticket that ties them together.

Letters: T tokens of this rank, K top-k, H hidden, R rows after dispatch, E local experts, G global experts,
C capacity per expert, W ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.modular.traffic import Traffic
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy

TicketT = TypeVar("TicketT")


@dataclass(frozen=True, slots=True)
class StandardRows:
    """Dispatched rows in the standard (contiguous) format.

    Attributes:
        x: [R, H], one row per token that has an expert here.
        topk_ids: [R, K], **local** expert ids; -1 = not on this rank, and nothing is promised of the weight behind it.
        topk_weights: [R, K], float32.
        x_scale: None; or [R, H / 128] float32 with any strides, x is then float8_e4m3fn, contiguous, quantised as
            `reference.quantize_fp8` says: column h of row r is x[r, h] * x_scale[r, h // 128]. Only where
            `BuildContext.fp8_rows` said so.
        out_dtype: of what the experts return; None: that of x. The composer fills it in for rows in fp8.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what the experts return: that of the layer's activations."""
        return self.out_dtype or self.x.dtype

    def for_experts(self, *, ids_dtype: torch.dtype | None, dtype: torch.dtype) -> "StandardRows":
        """The same rows with topk_ids in `ids_dtype` (None: as they are), for a layer whose activations are `dtype`."""
        return replace(self, topk_ids=self.topk_ids.to(ids_dtype or self.topk_ids.dtype), out_dtype=dtype)


@dataclass(frozen=True, slots=True)
class BatchedRows:
    """Dispatched rows in the batched format.

    Attributes:
        x: [E, C, H]; of block e the first expert_num_tokens[e] rows are real, the rest is uninitialised.
        expert_num_tokens: [E], int32, on the device.
        x_scale: None; or [E, C, H / 128] float32 with any strides, for x in fp8 as in `StandardRows`. Strides of
            (C * H / 128, 1, C), the scales of a group side by side, and C a multiple of 128 spare DeepGEMM a copy.
        out_dtype: as in `StandardRows`.
    """

    x: torch.Tensor
    expert_num_tokens: torch.Tensor
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what the experts return: that of the layer's activations."""
        return self.out_dtype or self.x.dtype

    def for_experts(self, *, ids_dtype: torch.dtype | None, dtype: torch.dtype) -> "BatchedRows":  # noqa: ARG002
        """The same rows, for a layer whose activations are `dtype`; this format carries no ids."""
        return replace(self, out_dtype=dtype)


Rows = StandardRows | BatchedRows


@dataclass(frozen=True, slots=True)
class Dispatched(Generic[TicketT]):
    """What prepare hands over: rows for the experts, and a ticket for finalize that nobody else looks into."""

    rows: Rows
    ticket: TicketT


class PrepareAndFinalize(ABC, Generic[TicketT]):
    """One all-to-all. Holds buffers, never per-call state: two calls may be in flight on one object.

    Every rank calls `prepare` and `finalize` once per layer and step, with zero tokens too.
    """

    activation_format: ClassVar[ActivationFormat]
    """The format of the rows that prepare returns and that finalize takes back."""

    weight_and_reduce_by: ClassVar[WeightAndReduceBy]
    """Who has to weight and sum over top-k when this all-to-all is used."""

    topk_indices_dtype: ClassVar[torch.dtype | None] = None
    """The dtype that topk_ids must have; None: int32 and int64 both do."""

    output_is_reduced: ClassVar[bool] = True
    """Whether the output holds the experts of all ranks; False: somebody still has to add it up over the ranks."""

    rows_are_tokens: ClassVar[bool] = False
    """Whether the rows are this rank's own tokens in their order: the experts may then write where finalize would."""

    fills_empty_slots: ClassVar[bool] = False
    """Whether a slot without an expert arrives as a row too, at an expert that the token does not name, to weigh 0."""

    traffic: Traffic | None = None
    """What was moved so far, where the host knows without asking the device; None: not counted."""

    tokens_per_round: int | None = None
    """The most tokens of a rank that one `prepare` takes; the composer cuts a larger step into lock-step rounds, each a
    `prepare`, the experts and a `finalize`. None: there is no such limit."""

    supports_async: ClassVar[bool] = False
    """Whether finalize_async returns before the rows are back, so that other work can run meanwhile."""

    @abstractmethod
    def most_rows(self, max_tokens_per_rank: int) -> int:
        """The most rows that `prepare` hands to the experts of this rank in a step of that bound.

        The experts' scratch memory is reserved for as many: R in the standard format, C in the batched format.
        """

    @abstractmethod
    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,
    ) -> Dispatched[TicketT]:
        """Send each token to the ranks that hold its experts.

        Args:
            x_TH: [T, H], float dtype; never written to. T may be 0.
            topk_ids_TK: [T, K], global expert ids; -1 = this slot has no expert. Ids past the last expert are refused.
            topk_weights_TK: [T, K], float32.
            max_tokens_per_rank: the largest T of any rank in this step, the same number on every rank; known to the
                host, so that receive buffers are sized to the step without a synchronisation.
            router_weight_on_input: the weights multiply the experts' input rather than their output. Whoever
                `weight_and_reduce_by` names applies them.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank` or than the buffers were reserved for.
            RankLostError: a rank did not take part in time.
        """

    @abstractmethod
    def finalize(self, y: torch.Tensor, ticket: TicketT, *, out_TH: torch.Tensor) -> None:
        """Bring the experts' rows home and write every element of `out_TH`.

        Args:
            y: where the experts weight and reduce [R, H]; else [R, K, H] (standard) or [E, C, H] (batched).
            ticket: of the `prepare` that these rows came from.
            out_TH: [T, H], in the order of that prepare's tokens.

        Raises:
            RankLostError: a rank did not take part in time.
        """

    def abandon(self, ticket: TicketT) -> None:
        """The experts of that `prepare` raised, and there will be no `finalize`: give back what the ticket holds."""

    def raise_if_lost(self) -> None:
        """Raise what the device noted down of earlier steps, without waiting for it.

        Asked before every step of the server, for in one that is replayed from a CUDA graph no other method is called.

        Raises:
            RankLostError: a rank did not take part in time.
        """

    def finalize_async(self, y: torch.Tensor, ticket: TicketT, *, out_TH: torch.Tensor) -> Callable[[], None]:
        """Start `finalize`; `out_TH` is written, and `y` may be reused, once the returned function was called."""
        self.finalize(y, ticket, out_TH=out_TH)
        return lambda: None

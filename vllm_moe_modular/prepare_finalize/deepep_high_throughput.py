"""DeepEP's high-throughput kernels: each token crosses to a rank once, and one partial sum comes back.

Letters: T tokens of this rank, K top-k, H hidden, R rows received, E the most experts of any rank, W ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, rows_in_fp8
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.deepep_library import (
    HighThroughputBuffer,
    high_throughput_buffer,
    high_throughput_hidden,
    load_deepep,
    losses,
    require_high_throughput,
    sends_fp8,
    topk_ids_dtype,
)
from vllm_moe_modular.prepare_finalize.routing import check_ranks, check_step
from vllm_moe_modular.prepare_finalize.uniform_experts import UniformExperts, padded_rows

NAME = "deepep_high_throughput"


@dataclass(frozen=True, slots=True)
class HighThroughputTicket:
    """How a dispatch went.

    Attributes:
        handle: the library's.
        rows: R.
    """

    handle: Any
    rows: int


class DeepEPHighThroughputPrepareAndFinalize(PrepareAndFinalize[HighThroughputTicket]):
    """The host waits in every dispatch until it knows how many rows arrive, so CUDA graphs cannot capture it.

    The rows of a dispatch come in the order of ranks, and a token's partial sums are added in float32 in that order:
    the same result at every run. Columns are rounded up to a multiple of 256 on the wire. A rank that stays away ends a
    wait after 100 s, which are compiled into the library: while the host waits as RankLostError, on the device as an
    error of CUDA.

    Device memory: buffers of some ten chunks for each rank of the host, as large as the library hints, whatever a step
    brings; 4 bytes for every global expert. The rows of a step are allocated in it.

    Args:
        group: the expert-parallel group.
        buffer: for rows of the layer's width, see `high_throughput_buffer`.
        placement: which rank holds which expert.
        hidden: H.
        device: of the activations.
        fp8: rows may be sent as float8_e4m3fn with a scale for every 128 columns; partial sums in bfloat16 all the
            same. They are where H is a multiple of 512; rows of other sizes go out in bfloat16, since columns that are
            added would leave rows that are not contiguous, which experts refuse in fp8.

    Raises:
        AgreementError: `placement` and `group` are not over the same number of ranks.
        UnsupportedError: the library does not take so many ranks, experts or columns.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.EXPERTS
    supports_async: ClassVar[bool] = True

    def __init__(
        self,
        *,
        group: RankGroup,
        buffer: HighThroughputBuffer,
        placement: ExpertPlacement,
        hidden: int,
        device: torch.device,
        fp8: bool = False,
    ) -> None:
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        self._group = group
        self._buffer = buffer
        self._num_experts = placement.num_experts
        self._hidden = hidden
        self._fp8 = sends_fp8(hidden, wire_hidden=high_throughput_hidden(hidden, fp8=True), fp8_rows=fp8)
        self._wire_hidden = high_throughput_hidden(hidden, fp8=self._fp8)
        self._experts = UniformExperts(placement, dtype=topk_ids_dtype(load_deepep()), device=device)

    @classmethod
    def build(cls, context: BuildContext) -> "DeepEPHighThroughputPrepareAndFinalize":
        """For layers with this placement; a collective if it is the first of its width."""
        group, placement = context.require_group(), context.placement
        check_ranks(placement, num_ranks=group.size, rank=group.rank)
        require_high_throughput(ranks=group.size, local_experts=max(placement.num_local), top_k=context.top_k)
        if context.dtype != torch.bfloat16:
            raise UnsupportedError(f"{context.dtype} in {NAME}", instead="it takes bfloat16; pass --dtype bfloat16")
        # Where rows go out in fp8 they are as wide as without: `sends_fp8`.
        hidden_bytes = high_throughput_hidden(context.hidden) * context.dtype.itemsize
        return cls(
            group=group,
            buffer=high_throughput_buffer(group, hidden_bytes),
            placement=placement,
            hidden=context.hidden,
            device=context.device,
            fp8=context.fp8_rows,
        )

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
    ) -> Dispatched[HighThroughputTicket]:
        """See `PrepareAndFinalize.prepare`. Ids outside the experts count as -1.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`.
            RankLostError: a rank did not take part in time.
            ShapeError: not the layer's hidden size.
            UnsupportedError: not in bfloat16.
        """
        check_step(
            topk_ids_TK,
            num_experts=self._num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            rank=self._group.rank,
            part=NAME,
        )
        self._check("x_TH", x_TH, x_TH.shape[0])
        x, ids, weights = self._to_send(x_TH, topk_ids_TK, topk_weights_TK)
        buffer = self._buffer.buffer
        with losses(self._group, NAME, "dispatch"):
            per_rank, per_host_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, self._experts.total)
            received, ids_RK, weights_RK, _, handle, _ = buffer.dispatch(
                rows_in_fp8(x) if self._fp8 else x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_host_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                config=self._buffer.dispatch_config,
            )
        x_RH, scale_RG = received if self._fp8 else (received, None)
        if scale_RG is not None:
            scale_RG = scale_RG[:, : -(-self._hidden // GROUP)]
        rows = StandardRows(x_RH[:, : self._hidden], ids_RK, weights_RK, x_scale=scale_RG)
        return Dispatched(rows, HighThroughputTicket(handle, rows=x_RH.shape[0]))

    def _to_send(
        self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A rank without tokens brings one that goes nowhere, so that no pointer is null."""
        x = padded_rows(x_TH, self._wire_hidden, least_rows=1)
        if x_TH.shape[0] > 0:
            return x, self._experts.ids(topk_ids_TK, past_the_end_is_none=True), topk_weights_TK.contiguous()
        nowhere = topk_ids_TK.new_full((1, topk_ids_TK.shape[1]), -1)
        return x, self._experts.ids(nowhere), topk_weights_TK.new_zeros(nowhere.shape)

    def finalize(self, y: torch.Tensor, ticket: HighThroughputTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`.

        Raises:
            ShapeError: `y` has not one row per dispatched row.
            UnsupportedError: not in bfloat16.
        """
        self._take_home(self._combine(y, ticket, wait=True)[0], out_TH)

    def finalize_async(
        self, y: torch.Tensor, ticket: HighThroughputTicket, *, out_TH: torch.Tensor
    ) -> Callable[[], None]:
        """Send the partial sums on their way home, on the library's own stream; see `finalize`."""
        home, event = self._combine(y, ticket, wait=False)

        def finish() -> None:
            event.current_stream_wait()
            self._take_home(home, out_TH)

        return finish

    def _combine(self, y: torch.Tensor, ticket: HighThroughputTicket, *, wait: bool) -> tuple[torch.Tensor, Any]:
        self._check("y", y, ticket.rows)
        with losses(self._group, NAME, "combine"):
            home, _, event = self._buffer.buffer.combine(
                padded_rows(y, self._wire_hidden),
                ticket.handle,
                config=self._buffer.combine_config,
                async_finish=not wait,
            )
        return home, event

    def _take_home(self, home: torch.Tensor, out_TH: torch.Tensor) -> None:
        T, H = out_TH.shape
        out_TH.copy_(home[:T, :H])

    def _check(self, name: str, t: torch.Tensor, rows: int) -> None:
        """The kernels trust the width that the buffers were reserved for."""
        if t.shape != (rows, self._hidden):
            raise ShapeError(name, want=("rows", "H"), values={"rows": rows, "H": self._hidden}, got=t.shape)
        if t.dtype != torch.bfloat16:
            raise UnsupportedError(f"{name} in {t.dtype} in {NAME}", instead="it moves bfloat16")

"""One-sided all-to-all for the GPUs of one host: each rank stores straight into its peers' memory, over NVLink or PCIe.

Where the experts take rows in fp8, tokens are quantised on their way out; what comes home is in the tokens' dtype.

Letters: T tokens of this rank, N tokens of the fullest rank, W ranks, K top-k, H hidden, R = W * N rows.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import CapacityError, MoEModularError, RankLostError, ShapeError, UnsupportedError
from vllm_moe_modular.kernels.nvlink_combine import nvlink_combine
from vllm_moe_modular.kernels.nvlink_dispatch import HOME_SHIFT, nvlink_dispatch
from vllm_moe_modular.kernels.nvlink_memory import (
    MAX_RANKS,
    PEER_UNIT_BYTES,
    NvlinkShape,
    NvlinkSlot,
    make_slot,
    unpack_failure,
)
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.prepare_finalize.routing import check_ranks, check_step

SLOTS = 2
"""Calls in flight: two micro-batches."""


class NvlinkBuffers:
    """The memory of one process for one shape: all slots, and which of them are free. See `buffers_for`.

    Args:
        slots: all of one shape and rank.
        mapping: what keeps the memory of the peers mapped.
    """

    def __init__(self, slots: list[NvlinkSlot], *, mapping: object = None) -> None:
        self.slots = slots
        self.shape = slots[0].shape
        self.rank = slots[0].rank
        self._mapping = mapping
        self._free = list(range(len(slots)))

    @classmethod
    def reserve(cls, process_group: dist.ProcessGroup, shape: NvlinkShape, device: torch.device) -> "NvlinkBuffers":
        """A collective of the group, over ranks of one host; waits for all of them.

        Raises:
            UnsupportedError: the ranks cannot map each other's memory, or are too many; rows in fp8 of a hidden size
                that is no multiple of 128.
        """
        rank = process_group.rank()
        if shape.ranks > MAX_RANKS or shape.dtype.itemsize > 4:
            raise UnsupportedError(
                f"nvlink over {shape.ranks} ranks in {shape.dtype}",
                instead=f"it takes at most {MAX_RANKS} ranks, and float16, bfloat16 or float32; use allgather",
            )
        if shape.fp8_rows and shape.hidden % GROUP:
            raise UnsupportedError(
                f"nvlink with rows in fp8 of hidden size {shape.hidden}",
                instead=f"it takes multiples of {GROUP}; build it with fp8_rows=False",
            )
        buffer = symmetric_memory.empty(SLOTS * shape.slot_bytes, dtype=torch.uint8, device=device)
        buffer.zero_()
        try:
            mapping = symmetric_memory.rendezvous(buffer, process_group)
        except RuntimeError as error:
            raise UnsupportedError(
                f"nvlink on rank {rank} of {shape.ranks}, which cannot map the memory of its peers ({error})",
                instead="it needs GPUs of one host with peer access to each other; use allgather",
            ) from error
        own = mapping.buffer_ptrs[rank]
        far = [(peer - own) // PEER_UNIT_BYTES for peer in mapping.buffer_ptrs]
        peers = torch.tensor(far, dtype=torch.int64, device=device)
        failure = torch.zeros(1, dtype=torch.int32, device=device)
        host_failure = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        parts = buffer.view(SLOTS, shape.slot_bytes).unbind()
        slots = [
            make_slot(shape, part, rank=rank, peers=peers, failure=failure, host_failure=host_failure)
            for part in parts
        ]  # fmt: skip
        # No rank may set a flag that another then zeroes.
        mapping.barrier()
        torch.cuda.synchronize(device)
        return cls(slots, mapping=mapping)

    @property
    def nbytes(self) -> int:
        """Symmetric memory held."""
        return len(self.slots) * self.shape.slot_bytes

    def take(self) -> int:
        """The first free slot: the same on every rank, because all ranks call in the same order."""
        if not self._free:
            raise MoEModularError(
                f"nvlink, rank {self.rank}: {len(self.slots)} calls are in flight already; finalize one of them "
                "before the next prepare"
            )
        return self._free.pop(0)

    def give_back(self, index: int) -> None:
        """The call that had this slot was finalized."""
        self._free = sorted([*self._free, index])

    def raise_if_lost(self, timeout_s: float) -> None:
        """Raise what the device noted down, without waiting for the device."""
        failure = unpack_failure(int(self.slots[0].host_failure))
        if failure is not None:
            raise RankLostError(
                f"nvlink, rank {self.rank} of {self.shape.ranks}: nothing came from rank {failure.rank} in the "
                f"{failure.phase} of step {failure.call} within {timeout_s:g} s. A group that lost a rank cannot go "
                "on: restart all of its ranks. If a step may take longer, raise VLLM_MOE_MODULAR_TIMEOUT_S",
                rank=failure.rank,
                step=failure.call,
                phase=failure.phase,
            )


_buffers: dict[tuple[str, torch.device, NvlinkShape], NvlinkBuffers] = {}


def buffers_for(process_group: dist.ProcessGroup, shape: NvlinkShape, device: torch.device) -> NvlinkBuffers:
    """The buffers that all layers of this shape share; reserved at the first call, which is a collective."""
    key = (str(process_group.group_name), device, shape)
    if key not in _buffers:
        _buffers[key] = NvlinkBuffers.reserve(process_group, shape, device)
    return _buffers[key]


@dataclass(frozen=True, slots=True)
class NvlinkTicket:
    """Where the rows of a dispatch lie.

    Attributes:
        slot: index of the slot that the call holds until finalize.
        tokens: T.
        rows_per_rank: N.
    """

    slot: int
    tokens: int
    rows_per_rank: int


class NvlinkPrepareAndFinalize(PrepareAndFinalize[NvlinkTicket]):
    """Two kernels, no host synchronisation, the same result at every run; CUDA graphs capture it at every size.

    Row w * N + t of a dispatch is token t of rank w, whether or not it has an expert here: rows without have ids of -1
    only, and their x is left over from earlier steps. So R = W * N is known to the host without asking, and
    `nvlink_dispatch` neither counts nor sorts.

    Calls of one process that share buffers are issued in the same order on every rank, and start in that order on the
    device for each slot: on one stream, or on streams that wait for each other. At most two are in flight.

    A peer that does not come in `timeout_s` ends the wait; the step's result is then wrong, no later wait on these
    buffers waits, and `raise_if_lost`, or the next prepare or finalize on the host, raises.

    Args:
        buffers: of the layer's shape, see `buffers_for`.
        placement: which rank holds which expert.
        timeout_s: how long a rank may be missing.

    Raises:
        AgreementError: `placement` and `buffers` are not over the same number of ranks.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[WeightAndReduceBy] = WeightAndReduceBy.EXPERTS

    def __init__(self, *, buffers: NvlinkBuffers, placement: ExpertPlacement, timeout_s: float) -> None:
        check_ranks(placement, num_ranks=buffers.shape.ranks, rank=buffers.rank)
        self._buffers = buffers
        self._num_experts = placement.num_experts
        self._timeout_s = timeout_s
        homes = [
            (rank << HOME_SHIFT) | local
            for rank, local in zip(placement.rank_of, placement.local_id_of, strict=True)
        ]  # fmt: skip
        self._home_G = torch.tensor(homes, dtype=torch.int32, device=buffers.slots[0].rows.device)

    @classmethod
    def build(cls, context: BuildContext) -> "NvlinkPrepareAndFinalize":
        """For layers with this placement; a collective if it is the first of its shape."""
        group = context.require_group()
        shape = NvlinkShape(
            ranks=group.size,
            capacity_tokens=max(1, context.capacity_tokens),
            top_k=context.top_k,
            hidden=context.hidden,
            dtype=context.dtype,
            fp8_rows=context.fp8_rows,
        )
        return cls(
            buffers=buffers_for(group.process_group, shape, context.device),
            placement=context.placement,
            timeout_s=group.timeout_s,
        )

    def most_rows(self, max_tokens_per_rank: int) -> int:
        """As many rows of every rank as the fullest one sends."""
        return self._buffers.shape.ranks * max(max_tokens_per_rank, 1)

    def prepare(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,  # noqa: ARG002 - the experts weight
    ) -> Dispatched[NvlinkTicket]:
        """See `PrepareAndFinalize.prepare`. Ids outside the experts count as -1. The rows are valid until finalize.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`, or than the buffers were reserved for.
            RankLostError: a rank did not take part in an earlier step in time.
            ShapeError: not the hidden size or top-k that the buffers were reserved for.
            UnsupportedError: not their dtype.
        """
        buffers, shape = self._buffers, self._buffers.shape
        check_step(
            topk_ids_TK,
            num_experts=self._num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            rank=buffers.rank,
            part="nvlink",
        )
        if max_tokens_per_rank > shape.capacity_tokens:
            raise CapacityError(
                f"nvlink, rank {buffers.rank}: a step of {max_tokens_per_rank} tokens per rank, "
                f"{shape.capacity_tokens} were reserved for at start-up; raise --max-num-batched-tokens to the largest "
                "step that you send"
            )
        self._check("x_TH", x_TH, x_TH.shape[0])
        if topk_ids_TK.shape[1] != shape.top_k:
            raise ShapeError(
                "topk_ids_TK", want=("T", "K"), values={"T": x_TH.shape[0], "K": shape.top_k}, got=topk_ids_TK.shape
            )
        buffers.raise_if_lost(self._timeout_s)
        ticket = NvlinkTicket(buffers.take(), x_TH.shape[0], max(1, max_tokens_per_rank))
        slot, R = buffers.slots[ticket.slot], shape.ranks * ticket.rows_per_rank
        try:
            nvlink_dispatch(
                slot, x_TH.contiguous(), topk_ids_TK.contiguous(), topk_weights_TK.contiguous(), self._home_G,
                rows_per_rank=ticket.rows_per_rank, timeout_ns=self._timeout_ns,
            )  # fmt: skip
        except BaseException:
            self.abandon(ticket)
            raise
        x_scale = None if slot.row_scales is None else slot.row_scales[:R]
        return Dispatched(StandardRows(slot.rows[:R], slot.row_ids[:R], slot.row_weights[:R], x_scale), ticket)

    def abandon(self, ticket: NvlinkTicket) -> None:
        """See `PrepareAndFinalize.abandon`."""
        self._buffers.give_back(ticket.slot)

    def raise_if_lost(self) -> None:
        """See `PrepareAndFinalize.raise_if_lost`."""
        self._buffers.raise_if_lost(self._timeout_s)

    def finalize(self, y: torch.Tensor, ticket: NvlinkTicket, *, out_TH: torch.Tensor) -> None:
        """See `PrepareAndFinalize.finalize`. Rows of `y` without an expert here are not read.

        Raises:
            RankLostError: a rank did not take part in an earlier step, or in the dispatch of this one, in time.
        """
        buffers = self._buffers
        self._check("y", y, buffers.shape.ranks * ticket.rows_per_rank)
        self._check("out_TH", out_TH, ticket.tokens)
        buffers.raise_if_lost(self._timeout_s)
        slot = buffers.slots[ticket.slot]
        out = out_TH if out_TH.is_contiguous() else out_TH.new_empty(out_TH.shape)
        # A peer may write the rows of its next step while we still add up ours.
        y = y.clone() if y.data_ptr() == slot.rows.data_ptr() else y.contiguous()
        nvlink_combine(slot, y, rows_per_rank=ticket.rows_per_rank, timeout_ns=self._timeout_ns, out_TH=out)
        if out is not out_TH:
            out_TH.copy_(out)
        buffers.give_back(ticket.slot)

    def _check(self, name: str, t: torch.Tensor, rows: int) -> None:
        """The kernels trust the shape and dtype that the buffers were reserved for."""
        shape = self._buffers.shape
        if t.shape != (rows, shape.hidden):
            raise ShapeError(name, want=("rows", "H"), values={"rows": rows, "H": shape.hidden}, got=t.shape)
        if t.dtype != shape.dtype:
            raise UnsupportedError(
                f"nvlink, rank {self._buffers.rank}: {name} in {t.dtype}",
                instead=f"its buffers were reserved for {shape.dtype}",
            )

    @property
    def _timeout_ns(self) -> int:
        return round(self._timeout_s * 1e9)

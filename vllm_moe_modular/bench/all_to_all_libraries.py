"""What our parts are measured against: their libraries, called as a user of each would, NCCL by hand, and the link.

A library runs on the very buffers that our part reserved, so that the difference is our code alone. What its user has
at hand before a call (ids in the library's dtype, how many tokens there are) is not timed.

Letters: T tokens of this rank, K top-k, H hidden, G experts of all ranks, E experts of this rank, W ranks, L tokens of
a round.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from vllm_moe_modular.bench.all_to_all_cases import FP8, LINK, NCCL, Case
from vllm_moe_modular.bench.all_to_all_peers import EXPERT_ROWS, Tokens, Transfer, draw, group_of
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.kernels.launch import multiprocessors
from vllm_moe_modular.kernels.quantize_fp8 import GROUP, rows_in_fp8
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.prepare_finalize.deepep_library import (
    LowLatencyShape,
    high_throughput_buffer,
    high_throughput_hidden,
    load_deepep,
    low_latency_buffer,
    low_latency_hidden,
    low_latency_round,
    require_high_throughput,
    require_low_latency,
    topk_ids_dtype,
)
from vllm_moe_modular.prepare_finalize.pplx_library import HIDDEN_STEP, PplxShape, fp8_scales, pplx_buffers, pplx_round
from vllm_moe_modular.testing.ranks import Here


def _require_plain(library: str, here: Here, case: Case, *, wire_hidden: int) -> None:
    """Raises:
    UnsupportedError: columns or experts would have to be added, which a direct call does not do.
    """
    if wire_hidden != case.H:
        raise UnsupportedError(f"hidden size {case.H} in {library}", instead=f"it sends {wire_hidden} columns")
    if case.G % here.size:
        raise UnsupportedError(
            f"{case.G} experts on {here.size} ranks in {library}", instead="it takes as many on each rank"
        )


def _require_bfloat16(name: str, case: Case) -> None:
    if case.rows == FP8:
        raise UnsupportedError(f"{name} with rows in fp8", instead="it is measured in bfloat16")


def _class(of: object) -> str:
    return f"{type(of).__module__}.{type(of).__qualname__}"


class DeepEPHighThroughput(Transfer):
    """Layout, dispatch, combine.

    Raises:
        UnsupportedError: DeepEP does not load or does not take the case.
    """

    def __init__(self, here: Here, case: Case) -> None:
        wire = high_throughput_hidden(case.H, fp8=case.rows == FP8)
        require_high_throughput(ranks=here.size, local_experts=-(-case.G // here.size), top_k=case.K)
        self._ids_dtype = topk_ids_dtype(load_deepep())
        _require_plain("deep_ep.Buffer", here, case, wire_hidden=wire)
        self._buffer = high_throughput_buffer(group_of(here), wire * torch.bfloat16.itemsize)
        self._experts = case.G
        self.sends_fp8 = case.rows == FP8
        self.ran = _class(self._buffer.buffer)

    def as_taken(self, tokens: Tokens) -> Tokens:
        """See `Transfer`."""
        return replace(tokens, ids=tokens.ids.to(self._ids_dtype))

    def dispatch(self, tokens: Tokens) -> tuple[Any, torch.Tensor, Any]:
        """See `Transfer`."""
        buffer = self._buffer.buffer
        per_rank, per_host_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(tokens.ids, self._experts)
        received, ids_RK, _, _, handle, _ = buffer.dispatch(
            rows_in_fp8(tokens.x) if self.sends_fp8 else tokens.x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=tokens.ids,
            topk_weights=tokens.weights,
            config=self._buffer.dispatch_config,
        )
        return received, ids_RK, handle

    def experts(self, sent: tuple[Any, torch.Tensor, Any]) -> torch.Tensor:
        """See `Transfer`."""
        received, ids_RK, _ = sent
        x_RH, scale_RG = received if self.sends_fp8 else (received, None)
        rows = StandardRows(x_RH, ids_RK, ids_RK.float(), scale_RG, torch.bfloat16)
        return dequantized_rows(rows) * (ids_RK >= 0).sum(1, keepdim=True).bfloat16()

    def unchanged(self, sent: tuple[Any, torch.Tensor, Any]) -> torch.Tensor:
        """See `Transfer`."""
        return torch.empty_like(sent[0][0], dtype=torch.bfloat16) if self.sends_fp8 else sent[0]

    def combine(self, sent: tuple[Any, torch.Tensor, Any], y: torch.Tensor) -> torch.Tensor:
        """See `Transfer`."""
        home: torch.Tensor = self._buffer.buffer.combine(y, sent[2], config=self._buffer.combine_config)[0]
        return home


class DeepEPLowLatency(Transfer):
    """Low-latency dispatch and combine, in rounds where there are more tokens than one takes.

    Raises:
        UnsupportedError: DeepEP does not load or does not take the case.
    """

    combine_takes = EXPERT_ROWS

    def __init__(self, here: Here, case: Case) -> None:
        require_low_latency(ranks=here.size, top_k=case.K)
        self._ids_dtype = topk_ids_dtype(load_deepep())
        _require_plain("deep_ep.Buffer", here, case, wire_hidden=low_latency_hidden(case.H))
        self._shape = LowLatencyShape(
            tokens_per_round=low_latency_round(case.low_latency_tokens, case.capacity_tokens, here.size),
            hidden=case.H,
            experts=case.G,
        )
        # Comparing runs each kernel once before a graph captures it.
        self._buffer = low_latency_buffer(group_of(here), self._shape, warm_up=lambda _: None).buffer
        self.tokens_per_round = self._shape.tokens_per_round
        self.sends_fp8 = case.rows == FP8
        self.ran = _class(self._buffer)

    def as_taken(self, tokens: Tokens) -> Tokens:
        """See `Transfer`."""
        return replace(tokens, ids=tokens.ids.to(self._ids_dtype))

    def dispatch(self, tokens: Tokens) -> tuple[Any, torch.Tensor, Tokens, Any]:
        """See `Transfer`."""
        received, counts_E, handle, _, _ = self._buffer.low_latency_dispatch(
            tokens.x, tokens.ids, self._shape.tokens_per_round, self._shape.experts, use_fp8=self.sends_fp8
        )
        return received, counts_E, tokens, handle

    def experts(self, sent: tuple[Any, torch.Tensor, Tokens, Any]) -> torch.Tensor:
        """See `Transfer`."""
        x_ECH, scale_ECG = sent[0] if self.sends_fp8 else (sent[0], None)
        return dequantized_rows(BatchedRows(x_ECH, sent[1], scale_ECG, torch.bfloat16))

    def unchanged(self, sent: tuple[Any, torch.Tensor, Tokens, Any]) -> torch.Tensor:
        """See `Transfer`."""
        return torch.empty_like(sent[0][0], dtype=torch.bfloat16) if self.sends_fp8 else sent[0]

    def combine(self, sent: tuple[Any, torch.Tensor, Tokens, Any], y: torch.Tensor) -> torch.Tensor:
        """See `Transfer`."""
        _, _, tokens, handle = sent
        home: torch.Tensor = self._buffer.low_latency_combine(y, tokens.ids, tokens.weights, handle)[0]
        return home


class Pplx(Transfer):
    """Dispatch and combine of `AllToAll.intranode`, in rounds where there are more tokens than one takes.

    Raises:
        UnsupportedError: pplx-kernels do not load or do not take the case.
    """

    combine_takes = EXPERT_ROWS

    def __init__(self, here: Here, case: Case) -> None:
        _require_plain("pplx_kernels", here, case, wire_hidden=-(-case.H // HIDDEN_STEP) * HIDDEN_STEP)
        self.sends_fp8 = case.rows == FP8
        if self.sends_fp8 and not fp8_scales(case.H):
            raise UnsupportedError(
                f"pplx_kernels with rows of {case.H} columns in fp8", instead="it sends multiples of 512 columns so"
            )
        L = pplx_round(case.low_latency_tokens, case.capacity_tokens, here.size, multiprocessors(here.device))
        shape = PplxShape(
            tokens_per_round=L, hidden=case.H, dtype=torch.float8_e4m3fn if self.sends_fp8 else torch.bfloat16,
            experts=case.G, top_k=case.K,
        )  # fmt: skip
        self._transport = pplx_buffers(group_of(here), shape).transports[0]
        self._blocks = (case.G // here.size, here.size * L, case.H)
        # Of a full round and of the last.
        self._bounds = {
            n: torch.tensor([n], dtype=torch.uint32, device=here.device) for n in {L, case.T % L, min(case.T, L)}
        }
        self.tokens_per_round = L
        self.ran = _class(self._transport)

    def as_taken(self, tokens: Tokens) -> Tokens:
        """See `Transfer`."""
        return replace(tokens, ids=tokens.ids.to(torch.uint32))

    def dispatch(self, tokens: Tokens) -> tuple[BatchedRows, Tokens]:
        """See `Transfer`."""
        values, scales = rows_in_fp8(tokens.x) if self.sends_fp8 else (tokens.x, None)
        x_ECH = values.new_empty(self._blocks)
        scale_ECG = None if scales is None else scales.new_empty((*self._blocks[:2], scales.shape[1]))
        counts_E = torch.empty(self._blocks[0], dtype=torch.int32, device=tokens.x.device)
        self._transport.dispatch(
            out_expert_num_tokens=counts_E,
            out_expert_x=x_ECH,
            out_expert_x_scale=scale_ECG,
            dp_x=values,
            dp_x_scale=scales,
            indices=tokens.ids,
            bound_m=self._bounds[len(tokens.x)],
        )
        return BatchedRows(x_ECH, counts_E, scale_ECG, torch.bfloat16), tokens

    def experts(self, sent: tuple[BatchedRows, Tokens]) -> torch.Tensor:
        """See `Transfer`."""
        return dequantized_rows(sent[0]) if self.sends_fp8 else sent[0].x

    def unchanged(self, sent: tuple[BatchedRows, Tokens]) -> torch.Tensor:
        """See `Transfer`."""
        return torch.empty_like(sent[0].x, dtype=torch.bfloat16) if self.sends_fp8 else sent[0].x

    def combine(self, sent: tuple[BatchedRows, Tokens], y: torch.Tensor) -> torch.Tensor:
        """See `Transfer`."""
        tokens = sent[1]
        out = torch.empty_like(tokens.x)
        self._transport.combine(
            out_tokens=out,
            indices=tokens.ids,
            weights=tokens.weights,
            expert_y=y,
            bound_m=self._bounds[len(tokens.x)],
        )
        return out


class Nccl(Transfer):
    """All-gather of rows, ids and weights; the ranks' shares back by reduce-scatter, which adds in bfloat16.

    Raises:
        UnsupportedError: the ranks met over something else; rows in fp8.
    """

    ran = "torch.distributed"

    def __init__(self, here: Here, case: Case) -> None:
        _require_bfloat16("NCCL by hand", case)
        if dist.get_backend(here.group) != "nccl":
            raise UnsupportedError("NCCL on ranks that met over gloo", instead="it needs a GPU for each rank")
        self._ranks = here.size
        rank_of = ExpertPlacement.linear(case.G, here.size).rank_of
        self._is_here_G = torch.tensor([rank == here.rank for rank in rank_of], device=here.device)

    def dispatch(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Transfer`."""
        gathered = []
        for t in (tokens.x, tokens.ids, tokens.weights):
            out = t.new_empty((self._ranks * t.shape[0], t.shape[1]))
            dist.all_gather_into_tensor(out, t)
            gathered.append(out)
        return gathered[0], gathered[1]

    def experts(self, sent: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See `Transfer`."""
        return sent[0] * self._is_here_G[sent[1].long()].sum(1, keepdim=True).bfloat16()

    def unchanged(self, sent: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See `Transfer`. Rows without an expert here go back too: to leave them out is left to the experts."""
        return sent[0]

    def combine(self, sent: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """See `Transfer`."""
        out = y.new_empty((y.shape[0] // self._ranks, y.shape[1]))
        dist.reduce_scatter_tensor(out, y)
        return out


@cache
def _mapped(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[torch.Tensor, Any]:
    buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer, symmetric_memory.rendezvous(buffer, group)


class Link(Transfer):
    """The least that has to cross, as plain copies into the memory of every other rank, all ranks at once, nobody
    waiting for anybody: a row for each rank that holds experts of a token, and one back. Nothing comes home.

    Attributes:
        bytes_each_way: that this rank sends in a round trip.

    Raises:
        UnsupportedError: the ranks cannot map each other's memory.
    """

    ran = "Tensor.copy_"
    combine_takes = "-"

    def __init__(self, here: Here, case: Case) -> None:
        self.sends_fp8 = case.rows == FP8
        home = case.H * torch.bfloat16.itemsize
        there = case.H + case.H // GROUP * torch.float32.itemsize if self.sends_fp8 else home
        of_a_rank = case.capacity_tokens * home
        try:
            mapping = _mapped(here.group, here.device, here.size * of_a_rank)[1]
        except RuntimeError as error:
            raise UnsupportedError(
                f"the link, whose memory cannot be mapped ({error})", instead="it needs peer access between the GPUs"
            ) from error
        rank_of = torch.tensor(ExpertPlacement.linear(case.G, here.size).rank_of, device=here.device)
        tokens = draw(case, here, 0)
        near = tokens.x.view(torch.uint8).flatten()
        self._there: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank in range(here.size):
            rows = int((rank_of[tokens.ids.long()] == rank).any(1).sum())
            if rank != here.rank and rows:
                far = mapping.get_buffer(rank, (here.size, of_a_rank), torch.uint8)[here.rank]
                self._there.append((far[: rows * there], near[: rows * there]))
                self._back.append((far[: rows * home], near[: rows * home]))
        self.bytes_each_way = sum(far.numel() for far, _ in (*self._there, *self._back))

    def dispatch(self, tokens: Tokens) -> Tokens:
        """See `Transfer`."""
        for far, near in self._there:
            far.copy_(near)
        return tokens

    def experts(self, sent: Tokens) -> torch.Tensor:
        """See `Transfer`."""
        return sent.x

    unchanged = experts

    def combine(self, sent: Tokens, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """As many rows come back as went out; each rank writes them to the others once more, which takes as long."""
        for far, near in self._back:
            far.copy_(near)
        return y


LIBRARIES: dict[str, Callable[[Here, Case], Transfer]] = {
    "deep_ep.high_throughput": DeepEPHighThroughput,
    "deep_ep.low_latency": DeepEPLowLatency,
    "pplx_kernels": Pplx,
    NCCL: Nccl,
    LINK: Link,
}
"""By the name of the peer."""

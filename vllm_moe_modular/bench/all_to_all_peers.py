"""All-to-alls as `all_to_all` runs them: one round trip, dispatch and combine, with experts that return their input.

Letters: T tokens per rank, K top-k, H hidden, G experts, W ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from vllm_moe_modular.kernels.nvlink_memory import NvlinkShape
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.prepare_finalize.nvlink import NvlinkPrepareAndFinalize, buffers_for
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.ranks import Here


@dataclass(frozen=True)
class Case:
    """T tokens on each rank, bf16."""

    T: int
    H: int
    G: int
    K: int


@dataclass(frozen=True)
class Tokens:
    """Of this rank in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


RoundTrip = Callable[[Tokens], torch.Tensor]
"""Every rank that was given a token's row gives it back as it came; returns the sum over the ranks, [T, H]."""


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        make: for one case, on every rank. Buffers hold `capacity` tokens per rank.
        answer: what a round trip has to return.
    """

    name: str
    make: Callable[[Here, Case, int], RoundTrip]
    answer: Callable[[Tokens, Case, Here], torch.Tensor]


def draw(case: Case, here: Here, seed: int) -> Tokens:
    g = torch.Generator(here.device).manual_seed(1000 * seed + here.rank)
    return Tokens(
        x=torch.randn(case.T, case.H, device=here.device, generator=g).bfloat16(),
        ids=torch.rand(case.T, case.G, device=here.device, generator=g).topk(case.K).indices.int(),
        weights=torch.rand(case.T, case.K, device=here.device, generator=g),
    )


def from_ranks_with_experts(tokens: Tokens, case: Case, here: Here) -> torch.Tensor:
    """Exact for two ranks: a row or its double."""
    rank_of = torch.tensor(ExpertPlacement.linear(case.G, here.size).rank_of, device=here.device)
    ranks = rank_of[tokens.ids.long()]
    shares = torch.stack([(ranks == w).any(1) for w in range(here.size)]).sum(0)
    return (tokens.x.float() * shares.unsqueeze(1)).bfloat16()


def from_all_ranks(tokens: Tokens, case: Case, here: Here) -> torch.Tensor:  # noqa: ARG001
    """Exact for two ranks."""
    return tokens.x * here.size


def as_sent_in_fp8(tokens: Tokens, case: Case, here: Here) -> torch.Tensor:
    """`from_ranks_with_experts` of what the tokens are after quantising."""
    meant = dequantize_fp8(*quantize_fp8(tokens.x)).bfloat16()
    return from_ranks_with_experts(replace(tokens, x=meant), case, here)


def _nvlink(
    here: Here, case: Case, capacity: int, *, fp8: bool = False, dispatch_alone: bool = False
) -> RoundTrip:  # fmt: skip
    """In a graph, which is what is timed, rows in fp8 are not turned back: that is the experts' work; nor need there be
    a combine, for a dispatch waits for the peers' dispatch only. What is compared is whole.
    """
    shape = NvlinkShape(here.size, capacity, case.K, case.H, torch.bfloat16, fp8_rows=fp8)
    buffers = buffers_for(here.group, shape, here.device)
    part = NvlinkPrepareAndFinalize(
        buffers=buffers,
        placement=ExpertPlacement.linear(case.G, here.size),
        timeout_s=20.0,
    )
    y = torch.empty(here.size * case.T, case.H, dtype=torch.bfloat16, device=here.device)

    def round_trip(tokens: Tokens) -> torch.Tensor:
        done = part.prepare(
            tokens.x, tokens.ids, tokens.weights, max_tokens_per_rank=case.T, router_weight_on_input=False
        )
        assert isinstance(done.rows, StandardRows), "nvlink delivers the standard format"
        timed = torch.cuda.is_current_stream_capturing()
        if timed and dispatch_alone:
            buffers.give_back(done.ticket.slot)
            return tokens.x
        if fp8 and not timed:
            y.copy_(dequantized_rows(done.rows.for_experts(ids_dtype=None, dtype=y.dtype)))
        out = torch.empty_like(tokens.x)
        part.finalize(y if fp8 else done.rows.x, done.ticket, out_TH=out)
        return out

    return round_trip


def _nccl(here: Here, case: Case, capacity: int) -> RoundTrip:  # noqa: ARG001
    """All-gather of rows, ids and weights; the ranks' shares back by reduce-scatter, which adds in bf16.

    Rows without an expert on a rank come back too: to leave them out of the sum is left to the experts.
    """

    def round_trip(tokens: Tokens) -> torch.Tensor:
        x = tokens.x.new_empty(here.size * case.T, case.H)
        ids = tokens.ids.new_empty(here.size * case.T, case.K)
        weights = tokens.weights.new_empty(here.size * case.T, case.K)
        dist.all_gather_into_tensor(x, tokens.x)
        dist.all_gather_into_tensor(ids, tokens.ids)
        dist.all_gather_into_tensor(weights, tokens.weights)
        out = torch.empty_like(tokens.x)
        dist.reduce_scatter_tensor(out, x)
        return out

    return round_trip


def _link_floor(here: Here, case: Case, capacity: int) -> RoundTrip:
    """A plain copy of the rows into the next rank's memory, twice, all ranks at once, nobody waiting for anybody."""
    buffer = symmetric_memory.empty(capacity, case.H, dtype=torch.bfloat16, device=here.device)
    mapping = symmetric_memory.rendezvous(buffer, here.group)
    far = mapping.get_buffer((here.rank + 1) % here.size, (capacity, case.H), torch.bfloat16)[: case.T]

    # The buffer lives as long as this function does.
    def round_trip(tokens: Tokens, _keep: torch.Tensor = buffer) -> torch.Tensor:
        far.copy_(tokens.x)
        far.copy_(tokens.x)
        return tokens.x

    return round_trip


FP8_PEERS = (
    Peer("nvlink, rows in fp8", partial(_nvlink, fp8=True), as_sent_in_fp8),
    Peer("nvlink dispatch alone", partial(_nvlink, dispatch_alone=True), from_ranks_with_experts),
    Peer("nvlink dispatch alone, fp8", partial(_nvlink, fp8=True, dispatch_alone=True), as_sent_in_fp8),
)
"""With `--fp8`: what quantising on the way out saves."""

PEERS = (
    Peer("nvlink", _nvlink, from_ranks_with_experts),
    Peer("all-gather / reduce-scatter", _nccl, from_all_ranks),
    Peer("plain copies (link floor)", _link_floor, lambda tokens, case, here: tokens.x),  # noqa: ARG005
)

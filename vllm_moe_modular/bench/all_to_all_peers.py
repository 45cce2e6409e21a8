"""What `all_to_all` runs: tokens, the right answer, and one dispatch and combine of our parts.

Letters: T tokens of this rank, K top-k, H hidden, G experts of all ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from vllm_moe_modular.bench.all_to_all_cases import FP8, Case, parts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.kernel import rounds_of
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.testing.conformance.plain_experts import identity_experts
from vllm_moe_modular.testing.ranks import Here

EXPERT_ROWS, REDUCED_ROWS = "expert rows", "reduced rows"
"""What a combine takes: a row of each expert of a token, or one of each rank, which the experts added up."""

LOST_AFTER_S = 20.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of this rank, or a round of them: x [T, H] bfloat16; ids [T, K], int32 unless a peer wants others; weights [T, K]
    float32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def draw(case: Case, here: Here, seed: int) -> Tokens:
    """Uniformly random routing, all weights 1, every rank as many tokens. Whole numbers of at most 7, of which 7 is in
    every group of 128: they are the same in fp8, and every order of a sum gives the same bits."""
    g = torch.Generator(here.device).manual_seed(1000 * seed + here.rank)
    x = torch.randint(-7, 8, (case.T, case.H), device=here.device, generator=g).bfloat16()
    x[:, ::128] = 7
    ids = torch.rand(case.T, case.G, device=here.device, generator=g).topk(case.K).indices.int()
    return Tokens(x, ids, torch.ones(case.T, case.K, device=here.device))


def right_answer(tokens: Tokens) -> torch.Tensor:
    """[T, H]: each of the K experts of a token returns it."""
    return tokens.x * tokens.ids.shape[1]


class Transfer(ABC):
    """One peer on one case, on one rank. Holds no per-call state.

    Attributes:
        ran: the class that does the work.
        combine_takes: `EXPERT_ROWS` or `REDUCED_ROWS`.
        tokens_per_round: the most tokens of a rank that a dispatch takes; None: there is no such limit.
        sends_fp8: whether its last dispatch did.
    """

    ran: str
    combine_takes: str = REDUCED_ROWS
    tokens_per_round: int | None = None
    sends_fp8: bool = False

    def as_taken(self, tokens: Tokens) -> Tokens:
        """`tokens` as its user's router would give them; not timed."""
        return tokens

    @abstractmethod
    def dispatch(self, tokens: Tokens) -> Any:
        """To the ranks that hold the experts; every rank brings as many tokens."""

    @abstractmethod
    def experts(self, sent: Any) -> torch.Tensor:
        """What combine takes, from experts that return their rows."""

    @abstractmethod
    def unchanged(self, sent: Any) -> torch.Tensor:
        """As much memory as `experts` returns, without their work: what is timed is the transfer alone."""

    @abstractmethod
    def combine(self, sent: Any, y: torch.Tensor) -> torch.Tensor:
        """[T, H], home."""


def in_rounds(transfer: Transfer, tokens: Tokens) -> list[Tokens]:
    """Cut to what one dispatch takes, as the composer does; not timed."""
    given, T = transfer.as_taken(tokens), len(tokens.x)
    cuts = [cut for cut, _ in rounds_of(T, T, transfer.tokens_per_round)]
    return [Tokens(given.x[cut], given.ids[cut], given.weights[cut]) for cut in cuts]


def round_trip(transfer: Transfer, rounds: list[Tokens]) -> None:
    """What is timed."""
    for tokens in rounds:
        sent = transfer.dispatch(tokens)
        transfer.combine(sent, transfer.unchanged(sent))


def answer(transfer: Transfer, rounds: list[Tokens]) -> torch.Tensor:
    """What is compared: a round trip by way of the experts, [T, H]."""
    out = []
    for tokens in rounds:
        sent = transfer.dispatch(tokens)
        out.append(transfer.combine(sent, transfer.experts(sent)))
    return torch.cat(out)


@cache
def _group_over(process_group: dist.ProcessGroup) -> RankGroup:
    return RankGroup(process_group, timeout_s=LOST_AFTER_S)


def group_of(here: Here) -> RankGroup:
    """The same one for all peers of a process, so that they share buffers."""
    return _group_over(here.group)


class OurPart(Transfer):
    """A registered all-to-all through its `prepare` and `finalize`.

    Raises:
        MoEModularError: it does not load, or does not take the case.
    """

    def __init__(self, name: str, here: Here, case: Case) -> None:
        self.part: PrepareAndFinalize[Any] = (
            parts()[name]
            .load()
            .build(
                BuildContext(
                    device=here.device,
                    dtype=torch.bfloat16,
                    placement=ExpertPlacement.linear(case.G, here.size),
                    rank=here.rank,
                    group=group_of(here),
                    hidden=case.H,
                    top_k=case.K,
                    capacity_tokens=case.capacity_tokens,
                    activation=None,
                    low_latency_tokens=case.low_latency_tokens,
                    fp8_rows=case.rows == FP8,
                )
            )
        )
        self.ran = type(self.part).__name__
        self._weighs_at_home = self.part.weight_and_reduce_by is WeightAndReduceBy.FINALIZE
        self.combine_takes = EXPERT_ROWS if self._weighs_at_home else REDUCED_ROWS
        self.tokens_per_round = self.part.tokens_per_round

    def as_taken(self, tokens: Tokens) -> Tokens:
        """See `Transfer`."""
        return replace(tokens, ids=tokens.ids.to(self.part.topk_indices_dtype or tokens.ids.dtype))

    def dispatch(self, tokens: Tokens) -> tuple[Tokens, Dispatched[Any]]:
        """See `Transfer`."""
        return tokens, self.part.prepare(
            tokens.x, tokens.ids, tokens.weights, max_tokens_per_rank=len(tokens.x), router_weight_on_input=False
        )

    def experts(self, sent: tuple[Tokens, Dispatched[Any]]) -> torch.Tensor:
        """See `Transfer`."""
        rows = sent[1].rows.for_experts(ids_dtype=None, dtype=torch.bfloat16)
        self.sends_fp8 = rows.x_scale is not None
        return identity_experts(self.part, replace(rows, x=dequantized_rows(rows), x_scale=None))

    def unchanged(self, sent: tuple[Tokens, Dispatched[Any]]) -> torch.Tensor:
        """See `Transfer`."""
        rows = sent[1].rows
        if self._weighs_at_home and isinstance(rows, StandardRows):
            return rows.x.new_empty((*rows.topk_ids.shape, rows.x.shape[1]), dtype=torch.bfloat16)
        return torch.empty_like(rows.x, dtype=torch.bfloat16)  # experts do not write where rows lie

    def combine(self, sent: tuple[Tokens, Dispatched[Any]], y: torch.Tensor) -> torch.Tensor:
        """See `Transfer`."""
        tokens, dispatched = sent
        out = torch.empty_like(tokens.x)
        self.part.finalize(y, dispatched.ticket, out_TH=out)
        return out

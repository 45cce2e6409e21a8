"""Small layers, routed at random, with what the right answer is; made alike on every rank and in the test."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import linear, silu

from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.reference.moe_layer import moe_layer

SILU = Activation(kind=ActivationKind.SILU)


@dataclass(frozen=True)
class Case:
    """`why` is the test's id.

    Attributes:
        tokens: [W], of each rank.
        absent: the share of slots that have no expert.
        only_expert: every slot names this one.
        repeated: the last slot of a token names the expert of its first.
        scattered: expert g is on rank g % W, and the local ids run backwards.
        max_tokens: announced per rank; None: the largest of `tokens`.
    """

    why: str
    tokens: tuple[int, ...]
    G: int = 8
    K: int = 2
    H: int = 64  # enough columns that the largest error is no accident of one element
    absent: float = 0.0
    only_expert: int | None = None
    repeated: bool = False
    scattered: bool = False
    weight_on_input: bool = False
    max_tokens: int | None = None
    ids_dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def max_tokens_per_rank(self) -> int:
        return max(self.tokens) if self.max_tokens is None else self.max_tokens

    @property
    def placement(self) -> ExpertPlacement:
        if not self.scattered:
            return ExpertPlacement.linear(self.G, self.num_ranks)
        held = [list(range(rank, self.G, self.num_ranks))[::-1] for rank in range(self.num_ranks)]
        return ExpertPlacement.from_expert_maps(
            [[of.index(g) if g in of else -1 for g in range(self.G)] for of in held]
        )


@dataclass(frozen=True)
class Batch:
    """The tokens of one rank."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.x.to(device), self.topk_ids.to(device), self.topk_weights.to(device))


def make_weights(case: Case, dtype: torch.dtype, *, F: int = 8) -> ExpertWeights:
    """All G experts."""
    g = torch.Generator().manual_seed(1)
    w13 = torch.randn(case.G, 2 * F, case.H, generator=g) * case.H**-0.5
    w2 = torch.randn(case.G, case.H, F, generator=g) * F**-0.5
    bias13, bias2 = torch.randn(case.G, 2 * F, generator=g), torch.randn(case.G, case.H, generator=g)
    return ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), w13_bias=bias13.to(dtype), w2_bias=bias2.to(dtype))


def of_rank(
    weights: ExpertWeights, placement: ExpertPlacement, rank: int, device: torch.device | None = None
) -> ExpertWeights:
    """Those that `rank` holds, by local id, on `device`."""
    held = [g for g in range(placement.num_experts) if placement.rank_of[g] == rank]
    held.sort(key=lambda g: placement.local_id_of[g])
    assert weights.w13_bias is not None, "make_weights gives biases"
    assert weights.w2_bias is not None, "make_weights gives biases"
    return ExpertWeights(
        w13=weights.w13[held].to(device),
        w2=weights.w2[held].to(device),
        w13_bias=weights.w13_bias[held].to(device),
        w2_bias=weights.w2_bias[held].to(device),
    )


def make_batch(case: Case, rank: int, dtype: torch.dtype, *, seed: int = 0) -> Batch:
    """Behind an id of -1 lies a weight of NaN."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    T, K = case.tokens[rank], case.K
    x = torch.randn(T, case.H, generator=g).to(dtype)
    ids = torch.rand(T, case.G, generator=g).argsort(dim=1)[:, :K]
    if case.only_expert is not None:
        ids = torch.full((T, K), case.only_expert)
    if case.repeated:
        ids[:, -1] = ids[:, 0]
    weights = torch.rand(T, K, generator=g)
    absent = torch.rand(T, K, generator=g) < case.absent
    return Batch(x, ids.masked_fill(absent, -1).to(case.ids_dtype), weights.masked_fill(absent, float("nan")))


@cache
def right_answer(case: Case, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of `make_batch`, in float64."""
    batch, weights = make_batch(case, rank, dtype, seed=seed), make_weights(case, dtype)
    return moe_answer(batch, weights, weight_on_input=case.weight_on_input)


def moe_answer(batch: Batch, weights: ExpertWeights, *, weight_on_input: bool = False) -> torch.Tensor:
    """Of any batch, in float64."""
    return moe_layer(
        batch.x, batch.topk_ids, batch.topk_weights, weights, SILU, router_weight_on_input=weight_on_input
    )  # fmt: skip


def plain_torch(batch: Batch, weights: ExpertWeights, *, weight_on_input: bool) -> torch.Tensor:
    """The obvious code, in the dtype of the batch."""
    out = torch.zeros_like(batch.x)
    assert weights.w13_bias is not None, "make_weights gives biases"
    assert weights.w2_bias is not None, "make_weights gives biases"
    for t, k in (batch.topk_ids >= 0).nonzero().tolist():
        e, weight = int(batch.topk_ids[t, k]), batch.topk_weights[t, k].to(batch.x.dtype)
        x = batch.x[t] * weight if weight_on_input else batch.x[t]
        gate, up = linear(x, weights.w13[e], weights.w13_bias[e]).chunk(2)
        y = linear(silu(gate) * up, weights.w2[e], weights.w2_bias[e])
        out[t] += y if weight_on_input else y * weight
    return out


def all_at_once(batch: Batch, weights: ExpertWeights) -> torch.Tensor:
    """Every expert on every token in float64, on the CPU: the same as `right_answer`, in few calls of torch."""
    x_TH, w13, w2 = batch.x.cpu().double(), weights.w13.double(), weights.w2.double()
    assert weights.w13_bias is not None, "make_weights gives biases"
    assert weights.w2_bias is not None, "make_weights gives biases"
    gate, up = (torch.matmul(x_TH, w13.mT) + weights.w13_bias.double().unsqueeze(1)).chunk(2, dim=2)
    y_GTH = torch.matmul(silu(gate) * up, w2.mT) + weights.w2_bias.double().unsqueeze(1)
    ids_TK = batch.topk_ids.cpu().long()
    y_TKH = y_GTH[ids_TK.clamp(min=0), torch.arange(len(x_TH)).unsqueeze(1)]
    weighted = y_TKH * batch.topk_weights.cpu().double().unsqueeze(-1)
    return torch.where(ids_TK.unsqueeze(-1) >= 0, weighted, 0.0).sum(dim=1)

"""The weighted sum over a token's top-k expert rows, and who does it.

    out[r, :] = sum over k with topk_ids[r, k] >= 0 of topk_weights[r, k] * y[r, k, :]

An id of -1 means "that expert is on another rank": the term is left out, so neither the row of `y` nor the weight
behind it is ever read. Exactly one of experts and finalize does this sum; the composer refuses a pair of which both,
or neither, would.
"""

from abc import ABC, abstractmethod
from enum import Enum

import torch


class WeightAndReduceBy(Enum):
    """Who weights and sums the top-k rows of a token."""

    EXPERTS = "experts"
    """The experts return one row per dispatched token, [R, H]; the all-to-all adds such rows up, unweighted."""

    FINALIZE = "finalize"
    """The experts return a row per token and expert; finalize weights them with the router's original weights."""


class TopKWeightAndReduce(ABC):
    """Weights and sums the top-k rows of each token. Stateless, so one object serves every layer and thread."""

    @abstractmethod
    def apply(
        self,
        y_RKH: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        *,
        router_weight_on_input: bool,
        out_RH: torch.Tensor,
    ) -> None:
        """Write every element of `out_RH`.

        Args:
            y_RKH: expert rows, [R, K, H]; a row behind an id of -1 may be uninitialised.
            topk_ids_RK: int32 or int64, [R, K]; -1 leaves the term out.
            topk_weights_RK: float32, [R, K]; may be uninitialised behind an id of -1.
            router_weight_on_input: the weights were applied to the input of the experts, so the sum is unweighted.
            out_RH: [R, H], any float dtype; rounded to once, at the end.
        """


class TorchTopKWeightAndReduce(TopKWeightAndReduce):
    """Plain torch, accumulating in float32 (float64 for float64 rows)."""

    def apply(
        self,
        y_RKH: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        *,
        router_weight_on_input: bool,
        out_RH: torch.Tensor,
    ) -> None:
        accumulate = torch.float64 if y_RKH.dtype == torch.float64 else torch.float32
        here_RK1 = (topk_ids_RK >= 0).unsqueeze(-1)
        terms = y_RKH.to(accumulate)
        if not router_weight_on_input:
            terms = terms * topk_weights_RK.to(accumulate).unsqueeze(-1)
        # where, not a multiplication by 0: what lies behind -1 may be NaN.
        out_RH.copy_(torch.where(here_RK1, terms, 0.0).sum(dim=1))

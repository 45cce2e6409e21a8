"""Experts to try an all-to-all with, for both formats."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, PrepareAndFinalize, Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.testing.layers import SILU


class PlainBatchedExperts(PermuteExpertsUnpermute):
    """Plain torch, one block after the other; what lies behind the real rows stays uninitialised."""

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.BATCHED
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.FINALIZE})

    def __init__(self, activation: Activation = SILU) -> None:
        self._of_a_block = TorchExperts(activation=activation)

    @classmethod
    def build(cls, context: BuildContext) -> "PlainBatchedExperts":
        """For one layer."""
        return cls(context.require_activation())

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,
        out_RH: torch.Tensor | None = None,  # noqa: ARG002 - a result of its own is allowed
    ) -> torch.Tensor:
        """See `PermuteExpertsUnpermute.apply`."""
        if not isinstance(rows, BatchedRows):
            raise UnsupportedError("the standard format in batched experts", instead="use the torch experts")
        x_ECH = dequantized_rows(rows)
        y_ECH = torch.full_like(x_ECH, float("nan"))
        for e, n in enumerate(rows.expert_num_tokens.tolist()):
            ids = torch.full((n, 1), e, device=rows.x.device)
            block = StandardRows(x_ECH[e, :n], ids, torch.ones(n, 1, device=rows.x.device))
            y_ECH[e, :n] = self._of_a_block.apply(
                block, weights, workspace=workspace, weight_and_reduce_by=weight_and_reduce_by,
                router_weight_on_input=router_weight_on_input,
            )[:, 0]  # fmt: skip
        return y_ECH


def plain_experts(part: PrepareAndFinalize[Any]) -> PermuteExpertsUnpermute:
    """Experts that go with `part`."""
    if part.activation_format is ActivationFormat.BATCHED:
        return PlainBatchedExperts()
    return TorchExperts(activation=SILU)


def identity_experts(part: PrepareAndFinalize[Any], rows: Rows) -> torch.Tensor:
    """What experts that change nothing return for `rows`, all weights being 1: a row of none is 0."""
    if not isinstance(rows, StandardRows):
        return rows.x
    here_RK = rows.topk_ids >= 0
    if part.weight_and_reduce_by is WeightAndReduceBy.EXPERTS:
        times_R1 = here_RK.sum(dim=1, keepdim=True)
        return torch.where(times_R1 > 0, rows.x * times_R1.to(rows.x.dtype), 0.0)
    return torch.where(here_RK.unsqueeze(-1), rows.x.unsqueeze(1), 0.0)

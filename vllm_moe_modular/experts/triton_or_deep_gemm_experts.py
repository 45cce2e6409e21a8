"""Experts `triton_or_deep_gemm`: for each call whichever of the two was faster for such a call, by measurement.

Letters: E experts, H hidden, F expert intermediate.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec


def prefers_deep_gemm(*, slots: int, num_experts: int, intermediate: int, fp8: bool) -> bool:
    """Pure; the limits were measured on an H200: benchmarks/notes_experts.md.

    Few rows per expert fill blocks of 128 badly; narrow experts do not pay for writing both halves of the first GEMM,
    and for wide ones it gains nothing.

    Args:
        slots: rows times top-k.
    """
    mean_rows = slots / num_experts
    if fp8:
        return mean_rows >= 96
    return 1024 <= intermediate < 4096 and mean_rows >= 192


class TritonOrDeepGemmExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: the choice depends on shapes alone.

    Args:
        triton, deep_gemm: for the same layer.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.EXPERTS})

    def __init__(self, triton: PermuteExpertsUnpermute, deep_gemm: PermuteExpertsUnpermute) -> None:
        self._triton = triton
        self._deep_gemm = deep_gemm

    @classmethod
    def build(cls, context: BuildContext) -> "TritonOrDeepGemmExperts":
        """For one layer."""
        return cls(TritonExperts.build(context), DeepGemmExperts.build(context))

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:
        """That of the one that would run."""
        return self._chosen(rows, weights).workspace(rows, weights)

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,
        out_RH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PermuteExpertsUnpermute.apply`; errors are those of the one that runs."""
        return self._chosen(rows, weights).apply(
            rows,
            weights,
            workspace=workspace,
            weight_and_reduce_by=weight_and_reduce_by,
            router_weight_on_input=router_weight_on_input,
            out_RH=out_RH,
        )

    def _chosen(self, rows: Rows, weights: ExpertWeights) -> PermuteExpertsUnpermute:
        if not isinstance(rows, StandardRows):
            return self._triton  # which says what is wrong
        num_experts, _, intermediate = weights.w2.shape
        prefers = prefers_deep_gemm(
            slots=rows.topk_ids.numel(),
            num_experts=num_experts,
            intermediate=intermediate,
            fp8=weights.w2_scale is not None,
        )
        return self._deep_gemm if prefers else self._triton

"""Experts `triton_or_deep_gemm`: in fp8 for each call whichever of the two was faster for such a call; else triton.

Letters: R rows, K top-k, H hidden.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.tuned_tables import NO_TABLE, TunedCell, TunedTable, tuned_shape, tuned_table
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec


def prefers_deep_gemm(*, slots: int, num_experts: int, fp8: bool, tuned: TunedCell | None = None) -> bool:
    """Pure; the limit was measured on an H200: benchmarks/notes_experts.md.

    Few rows per expert fill blocks of 128 badly. In bfloat16 it gains at most 4 % and takes up to twice the scratch
    memory, because it needs the rows copied: who wants that names `deep_gemm`.

    Args:
        slots: rows times top-k.
        tuned: what a table of this GPU has for the problem, which wins where both were measured; None: nothing.
    """
    if not fp8:
        return False
    untuned = slots >= 96 * max(1, num_experts)
    return untuned if tuned is None else tuned.prefers_deep_gemm(untuned)


class TritonOrDeepGemmExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: the choice depends on shapes alone.

    Args:
        triton, deep_gemm: for the same layer.
        tuned: what is asked before the choice.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.EXPERTS})
    compiles_by_rows: ClassVar[bool] = True

    def __init__(
        self, triton: PermuteExpertsUnpermute, deep_gemm: PermuteExpertsUnpermute, *, tuned: TunedTable = NO_TABLE
    ) -> None:
        self._triton = triton
        self._deep_gemm = deep_gemm
        self._tuned = tuned

    @classmethod
    def build(cls, context: BuildContext) -> "TritonOrDeepGemmExperts":
        """For one layer."""
        tuned = tuned_table(context.device, context.tuned)
        return cls(TritonExperts.build(context), DeepGemmExperts.build(context), tuned=tuned)

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
        R, K = rows.topk_ids.shape
        prefers = prefers_deep_gemm(
            slots=R * K,
            num_experts=len(weights.w2),
            fp8=weights.w2_scale is not None,
            tuned=self._tuned.cell(tuned_shape(weights, K), R) if self._tuned.shapes else None,
        )
        return self._deep_gemm if prefers else self._triton

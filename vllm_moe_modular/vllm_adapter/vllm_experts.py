"""Experts `vllm`: whatever expert kernel vLLM chose for the layer's quant method, reused as it is.

vLLM's own method is called with its kernel's all-to-all taken out and the layer's expert map replaced: what arrives are
the rows of this rank, with local ids. So its weights keep the names, layout and scales that it gave them.
"""

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.vllm_adapter.method import no_modular_form


def why_not_reusable(quant_method: Any) -> str:
    """Why the expert kernel of a method whose weights were processed cannot be reused; empty: it can."""
    kernel = getattr(quant_method, "moe_kernel", None)  # a layer may have the method of a linear layer
    if kernel is None:
        return no_modular_form(quant_method)
    experts = type(kernel.fused_experts).__name__
    if kernel.is_monolithic:
        return f"vLLM's {experts} routes and runs the experts in one kernel; choose another with --moe-backend"
    if kernel.fused_experts.activation_format() is not mk.FusedMoEActivationFormat.Standard:
        return f"vLLM's {experts} takes the batched format; leave --all2all-backend at its default"
    return ""


class VllmExperts(PermuteExpertsUnpermute):
    """Runs the kernel of one layer's own quant method. Scratch memory is vLLM's.

    Args:
        layer: vLLM's `RoutedExperts`, whose method was not replaced yet and whose weights were processed.
        num_experts: of this rank.

    Raises:
        UnsupportedError: the method's kernel cannot be reused; says why.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.EXPERTS})
    topk_indices_dtype: ClassVar[torch.dtype | None] = torch.int32

    def __init__(self, layer: Any, *, num_experts: int, device: torch.device) -> None:
        if why := why_not_reusable(layer.quant_method):
            raise UnsupportedError("the vllm experts on this layer", instead=why)
        self._method = layer.quant_method
        self._alone: Any = None  # a copy of the method, whose kernel has no all-to-all
        self._num_experts = num_experts
        # One expert more, which is nowhere: where slots without an expert here are sent. Kernels for CPUs ignore the
        # map, so that there such slots go to an expert that is here, with a weight of 0.
        self._has_map = device.type != "cpu"
        expert_map = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        expert_map[num_experts] = -1
        self._layer = _LayerOfOneRank(layer, num_experts, expert_map if self._has_map else None)

    @classmethod
    def build(cls, context: BuildContext) -> "VllmExperts":
        """For the layer of the context."""
        here = sum(holder == context.rank for holder in context.placement.rank_of)
        return cls(context.require_layer(), num_experts=here, device=context.device)

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,  # noqa: ARG002 - the method has its own
        *,
        workspace: Sequence[torch.Tensor],  # noqa: ARG002 - vLLM's
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,  # noqa: ARG002 - the layer says so to the method
        out_RH: torch.Tensor | None = None,  # noqa: ARG002 - vLLM allocates
    ) -> torch.Tensor:
        """See `PermuteExpertsUnpermute.apply`; weights and sums over top-k as vLLM's kernel does.

        Raises:
            UnsupportedError: the weighted sum was left to finalize, or the rows are batched.
        """
        if not isinstance(rows, StandardRows):
            raise UnsupportedError("the batched format in the vllm experts", instead="choose a standard all-to-all")
        if weight_and_reduce_by is not WeightAndReduceBy.EXPERTS:
            raise UnsupportedError(
                "leaving the weighted sum of the vllm experts to finalize",
                instead="choose an all-to-all that leaves it to the experts",
            )
        if rows.x.shape[0] == 0:
            return torch.empty_like(rows.x)
        here_RK = (rows.topk_ids >= 0) & (rows.topk_ids < self._num_experts)
        nowhere = self._num_experts if self._has_map else 0
        return self._method_alone().apply(
            self._layer,
            rows.x,
            rows.topk_weights.masked_fill(~here_RK, 0.0),
            rows.topk_ids.masked_fill(~here_RK, nowhere),
            None,
            None,
        )

    def _method_alone(self) -> Any:
        experts = self._method.moe_kernel.fused_experts  # a reload may have made new ones
        if self._alone is None or self._alone.moe_kernel.fused_experts is not experts:
            self._alone = _copy_of(self._method)
            self._alone.moe_kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
        return self._alone


def _copy_of(quant_method: Any) -> Any:
    """A shallow copy whose own bound methods, which vLLM keeps some of, are bound to the copy."""
    copied = copy.copy(quant_method)
    for name, value in list(vars(copied).items()):
        if isinstance(value, MethodType) and value.__self__ is quant_method:
            setattr(copied, name, MethodType(value.__func__, copied))
    return copied


class _LayerOfOneRank:
    """vLLM's layer, but that its experts are those of this rank, numbered from 0."""

    def __init__(self, layer: Any, num_experts: int, expert_map: torch.Tensor | None) -> None:
        self._layer = layer
        self.global_num_experts = num_experts if expert_map is None else num_experts + 1
        self.expert_map = expert_map

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

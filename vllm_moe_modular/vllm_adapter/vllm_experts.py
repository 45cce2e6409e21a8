"""Experts `vllm`: whatever expert kernel vLLM chose for the layer's quant method, reused as it is.

vLLM's own method is called, with the all-to-all of its kernel taken out. What arrives are rows of this rank with local
ids; its kernels get back the global ids that their own expert map takes to these. So the weights keep the names, layout
and scales that vLLM gave them.

Letters: R rows, K top-k, E local experts.
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
from vllm_moe_modular.experts.requirements import require_weighting_by_experts, standard
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.vllm_adapter.method import no_modular_form

_LOADED_BY_NAME = ("modelopt", "compressed")
"""In names of quant methods that `RoutedExperts.weight_loader` treats otherwise."""


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


def why_not_transferred(quant_method: Any) -> str:
    """Why weights that vLLM sends while serving would not find their place behind a method of ours; empty: they do."""
    name = type(quant_method).__name__
    if not any(word in name.lower() for word in _LOADED_BY_NAME):
        return ""
    return f"vLLM's weight transfer loads tensors of {name} by the name of the method, which ours does not have"


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
        self._layer = layer
        self._num_experts = num_experts
        self._global_of_E: torch.Tensor | None = None  # [E + 1], and last an expert that is not here
        if layer.expert_map is not None and device.type != "cpu":  # kernels for CPUs pay no heed to it
            self._global_of_E = _inverse(layer.expert_map.tolist(), num_experts).to(device)

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
        rows = standard(rows, experts="vllm")
        require_weighting_by_experts(weight_and_reduce_by, experts="vllm")
        if rows.x.shape[0] == 0:
            return torch.empty_like(rows.x)
        ids_RK, weights_RK = rows.topk_ids, rows.topk_weights
        here_RK = (ids_RK >= 0) & (ids_RK < self._num_experts)
        if self._global_of_E is not None:
            ids_RK = self._global_of_E[torch.where(here_RK, ids_RK, self._num_experts)]
        else:  # no expert is elsewhere: any will do, with a weight of 0
            ids_RK, weights_RK = ids_RK.masked_fill(~here_RK, 0), weights_RK.masked_fill(~here_RK, 0.0)
        return self._method_alone().apply(self._layer, rows.x, weights_RK, ids_RK, None, None)

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


def _inverse(expert_map: list[int], num_experts: int) -> torch.Tensor:
    """[E + 1], int32: the global id of every local expert, then one that is not here."""
    global_of = {local: g for g, local in enumerate(expert_map)}
    return torch.tensor([*(global_of[e] for e in range(num_experts)), global_of[-1]], dtype=torch.int32)

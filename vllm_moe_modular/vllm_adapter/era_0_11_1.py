"""vLLM 0.11.1 and 0.11.2: the communicator calls `FusedMoE.maybe_init_modular_kernel`, which replaces the quant method.

The rest is 0.11.0's, but for the shared experts: the layer leaves them to a `FusedMoEModularMethod`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import (
    FusedMoEModularMethod as VllmFusedMoEModularMethod,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_moe_modular.modular.two_kernels import Kernel
from vllm_moe_modular.vllm_adapter import era_0_11_0
from vllm_moe_modular.vllm_adapter.layer import MoELayer
from vllm_moe_modular.vllm_adapter.method import ModularForward
from vllm_moe_modular.vllm_adapter.patches import Patch


class FusedMoEModularMethod(VllmFusedMoEModularMethod):
    """vLLM's class of that name, running a kernel of ours."""

    def __init__(self, old_quant_method: Any, forward: ModularForward) -> None:
        super().__init__(old_quant_method, _experts_view(forward))
        self.modular_forward = forward

    @property
    def kernel(self) -> Kernel:
        """What runs."""
        return self.modular_forward.kernel

    def process_weights_after_loading(self, layer: Any) -> None:
        self.old_quant_method.process_weights_after_loading(layer)
        self.moe_quant_config = self.old_quant_method.moe_quant_config

    def apply(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **keywords: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[T, H] of this rank's routed experts; with shared experts a pair, theirs first."""
        if keywords["enable_eplb"]:
            era_0_11_0.check_eplb(self, keywords)
        topk_weights, topk_ids = era_0_11_0.route(
            layer, x, router_logits, indices_dtype=self.topk_indices_dtype, **keywords
        )
        if layer.shared_experts is None:
            return self.modular_forward(x, topk_weights, topk_ids)
        shared: list[torch.Tensor] = []
        routed = self.modular_forward(
            x, topk_weights, topk_ids, meanwhile=lambda: shared.append(layer.shared_experts(x))
        )
        return shared[0], routed


def _experts_view(forward: ModularForward) -> Any:
    """Answers what the layer asks of `fused_experts`."""
    return SimpleNamespace(
        output_is_reduced=lambda: forward.output_is_reduced,
        supports_expert_map=lambda: True,
        prepare_finalize=SimpleNamespace(topk_indices_dtype=lambda: forward.kernel.topk_indices_dtype),
    )


class FusedMoELayer(era_0_11_0.FusedMoELayer):
    """A `FusedMoE` that asks the class of its method whether it moves tokens itself."""

    def replace_quant_method(self, method: Any) -> None:
        self.module.quant_method = method


class Adapter(era_0_11_0.Adapter):
    """The seams of 0.11.1."""

    unquantized = UnquantizedFusedMoEMethod

    @property
    def patches(self) -> tuple[Patch, ...]:
        layer = "vllm.model_executor.layers.fused_moe.layer:FusedMoE"
        return (
            *self._load_patches(f"{UnquantizedFusedMoEMethod.__module__}:UnquantizedFusedMoEMethod"),
            Patch(
                target=f"{layer}.maybe_init_modular_kernel",
                wrapper=self._layer_at_buffer_set_up,
                why="this is where the communicator asks a layer to set up its all-to-all",
                upstream="moved to MoERunner in 0.24, removed in 0.28",
                remove_when="0.11.1 is no longer supported",
            ),
            Patch(
                target=f"{layer}.init_prepare_finalize",
                wrapper=self._visit,
                adds=True,
                why="the hook has one name on the layer in every era",
                upstream="renamed to maybe_init_modular_kernel in this release",
                remove_when="0.11.1 is no longer supported",
            ),
        )

    def _layer_at_buffer_set_up(self, original: Any, module: Any) -> None:
        layer = self.layer(module) if self.runtime.settings.enabled else None
        if layer is not None:
            if self.is_set_up_later(layer):
                return
            self.init_prepare_finalize(layer)
        if layer is None or not layer.is_swapped:
            original(module)

    def layer(self, module: Any) -> MoELayer | None:
        found = super().layer(module)
        if found is None:
            return None
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        return FusedMoELayer(module, max_num_batched_tokens=limit, unquantized=self.unquantized)

    def make_method(self, layer: MoELayer, forward: ModularForward) -> Any:
        return FusedMoEModularMethod(layer.quant_method, forward)

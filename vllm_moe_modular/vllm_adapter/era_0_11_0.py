"""vLLM 0.11.0: the release line where `init_prepare_finalize` lives.

At communication-buffer set-up the communicator walks the model and calls `quant_method.init_prepare_finalize(layer)` of
every `FusedMoE`. That call is where a quant method is replaced here. It is made neither on a CPU nor in a group of one
rank, so the end of `Worker.load_model` visits what is left. `compatibility.py` lists what this file relies on.
"""

from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe import layer as vllm_layer
from vllm.platforms import current_platform

from vllm_moe_modular.modular.experts import Activation
from vllm_moe_modular.modular.two_kernels import Kernel
from vllm_moe_modular.selection.problem import Problem
from vllm_moe_modular.vllm_adapter import adapter
from vllm_moe_modular.vllm_adapter.layer import MoELayer, Ranks, make_activation, unwrapped
from vllm_moe_modular.vllm_adapter.method import ModularForward, no_modular_form, require_eplb_maps
from vllm_moe_modular.vllm_adapter.patches import Patch


class FusedMoELayer(MoELayer):
    """A `FusedMoE`, which in this era owns the weights, the routing and the quant method.

    Args:
        max_num_batched_tokens: the scheduler's limit; the layer's own number is that of vLLM's chunks.
    """

    module: Any

    def __init__(self, module: Any, *, max_num_batched_tokens: int, unquantized: type) -> None:
        super().__init__(module)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._unquantized = unquantized

    @property
    def name(self) -> str:
        return self.module.layer_name

    @property
    def problem(self) -> Problem:
        m, method, ranks = self.module, self.quant_method, self.ranks
        plain = type(method) is self._unquantized
        return Problem(
            num_experts=m.global_num_experts,
            num_local_experts=-(-m.global_num_experts // m.ep_size),
            top_k=m.top_k,
            hidden=m.hidden_size,
            intermediate=m.intermediate_size_per_partition,
            activation=m.activation,
            has_bias=m.moe_config.has_bias,
            dtype=str(m.moe_config.in_dtype).removeprefix("torch."),
            quant_scheme="none" if plain else type(method).__name__,
            weights_missing=self.weights_missing if plain else "",
            router_weight_on_input=self.router_weight_on_input,
            tp_size=ranks.tp_size,
            dp_size=m.dp_size,
            ep_size=m.ep_size,
            sequence_parallel=m.is_sequence_parallel,
            capacity_tokens=self._max_num_batched_tokens,
            eplb=m.enable_eplb,
            vllm_experts="the experts of vLLM 0.11 cannot be taken out of their layer; serve with 0.24 or later",
            irreplaceable=self._irreplaceable(plain),
        )

    def _irreplaceable(self, plain: bool) -> str:
        if not plain:
            return no_modular_form(self.quant_method)
        if self.module.zero_expert_num:
            return "zero experts are computed by vLLM's own method; the layer stays with vLLM"
        return ""

    @property
    def ranks(self) -> Ranks:
        m, tp = self.module, parallel_state.get_tp_group()
        return Ranks(m.ep_rank, m.ep_size, tp.rank_in_group, tp.world_size, m.is_sequence_parallel)

    @property
    def activation(self) -> Activation | None:
        return make_activation(self.module.activation, None, None, None)

    @property
    def expert_map(self) -> list[int] | None:
        found = self.module.expert_map
        return None if found is None else found.tolist()

    def replace_quant_method(self, method: Any) -> None:
        self.module.quant_method = method
        if self.module.dp_size > 1:
            self.module.moe_config = without_naive_dispatch(self.module.moe_config)


def without_naive_dispatch(config: Any) -> Any:
    """The layer's config, saying that its method moves tokens itself.

    The layer asks two things before it gathers all tokens itself: whether DeepEP's kernels are in use, which would also
    drop the sum over tensor-parallel ranks that shared experts need, and whether FlashInfer's are, which changes
    nothing else for weights that are not nvfp4.
    """
    own = copy(config)
    own.__class__ = type(type(config).__name__, (type(config),), {"use_flashinfer_cutlass_kernels": True})
    return own


def route(
    layer: Any, x: torch.Tensor, router_logits: torch.Tensor, *, indices_dtype: torch.dtype | None, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights and topk_ids, both [T, K], by the router that vLLM's own method of this device uses."""
    asked = (
        "top_k", "use_grouped_topk", "renormalize", "topk_group", "num_expert_group", "custom_routing_function",
        "scoring_func", "routed_scaling_factor", "e_score_correction_bias",
    )  # fmt: skip
    routing = {name: keywords[name] for name in asked}
    if current_platform.is_cpu():
        topk_weights, topk_ids = cpu_fused_moe.select_experts(hidden_states=x, router_logits=router_logits, **routing)
        return topk_weights, topk_ids if indices_dtype is None else topk_ids.to(indices_dtype)
    balancing = ("enable_eplb", "expert_load_view", "logical_to_physical_map", "logical_replica_count")
    topk_weights, topk_ids, _ = type(layer).select_experts(
        hidden_states=x,
        router_logits=router_logits,
        indices_type=indices_dtype,
        **routing,
        **{name: keywords[name] for name in balancing},
    )
    return topk_weights, topk_ids


class FusedMoEModularMethod(vllm_layer.FusedMoEMethodBase, torch.nn.Module):
    """A quant method that runs a kernel of ours; vLLM has no class of that name in this release.

    `fused_experts` stays None: the layer then runs the shared experts itself, on the original hidden states, and takes
    one tensor from `apply`.
    """

    def __init__(self, old_quant_method: Any, forward: ModularForward) -> None:
        torch.nn.Module.__init__(self)
        self.moe = old_quant_method.moe
        self.moe_quant_config = old_quant_method.moe_quant_config
        self.fused_experts = None
        self.topk_indices_dtype = forward.kernel.topk_indices_dtype
        self.old_quant_method = old_quant_method
        self.modular_forward = forward

    @property
    def kernel(self) -> Kernel:
        """What runs."""
        return self.modular_forward.kernel

    @property
    def supports_eplb(self) -> bool:
        """Whether vLLM can balance the experts of the old method; this release keeps that as a list of two classes."""
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        return isinstance(self.old_quant_method, Fp8MoEMethod | vllm_layer.UnquantizedFusedMoEMethod)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were created by the method that this one replaced")

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self.moe_quant_config

    def process_weights_after_loading(self, layer: Any) -> None:
        self.old_quant_method.process_weights_after_loading(layer)
        self.moe_quant_config = self.old_quant_method.moe_quant_config

    def apply(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **keywords: Any) -> torch.Tensor:  # type: ignore[override]
        """[T, H] of this rank's routed experts."""
        if keywords["enable_eplb"]:
            check_eplb(self, keywords)
        topk_weights, topk_ids = route(layer, x, router_logits, indices_dtype=self.topk_indices_dtype, **keywords)
        return self.modular_forward(x, topk_weights, topk_ids)


def check_eplb(method: Any, keywords: dict[str, Any]) -> None:
    """Require what this era hands over when expert load balancing is on."""
    maps = ("expert_load_view", "logical_to_physical_map", "logical_replica_count")
    require_eplb_maps(
        method.old_quant_method, supported=method.supports_eplb, **{name: keywords[name] for name in maps}
    )


class Adapter(adapter.Adapter):
    """The seams of 0.11.0."""

    unquantized: type = vllm_layer.UnquantizedFusedMoEMethod

    @property
    def patches(self) -> tuple[Patch, ...]:
        return (
            *self._load_patches(f"{vllm_layer.__name__}:UnquantizedFusedMoEMethod"),
            Patch(
                target=f"{vllm_layer.__name__}:FusedMoEMethodBase.init_prepare_finalize",
                wrapper=self._at_buffer_set_up,
                why="this is where the communicator asks a method to set up its all-to-all",
                upstream="replaced by FusedMoE.maybe_init_modular_kernel in 0.11.1",
                remove_when="0.11.0 is no longer supported",
            ),
            Patch(
                target=f"{vllm_layer.__name__}:FusedMoE.init_prepare_finalize",
                wrapper=self._visit,
                adds=True,
                why="the hook has one name on the layer in every era",
                upstream="vLLM has the hook on the method in this release",
                remove_when="0.11.0 is no longer supported",
            ),
        )

    def _load_patches(self, unquantized: str) -> tuple[Patch, ...]:
        return (
            Patch(
                target="vllm.v1.worker.gpu_worker:Worker.load_model",
                wrapper=self.load_model,
                why="the communicator sets up no buffers on a CPU and in a group of one rank",
                upstream="no CPU runner calls prepare_communication_buffer_for_model up to 0.17.1",
                remove_when="0.11 is no longer supported",
            ),
            Patch(
                target="vllm.v1.worker.gpu_worker:Worker.execute_model",
                wrapper=self.execute_model,
                why="a step that is replayed from a CUDA graph runs no line of ours, and a lost rank has to be told",
                upstream="vLLM has no hook before a step",
                remove_when="0.11 is no longer supported",
            ),
            Patch(
                target=f"{unquantized}.process_weights_after_loading",
                wrapper=self.process_weights,
                why="vLLM prepacks the weights for its own kernel on some devices, and the plain layout is lost",
                upstream="vLLM pull request 53897 would let experts be registered, and be asked for the layout",
                remove_when="0.11 is no longer supported",
            ),
        )

    def _at_buffer_set_up(self, original: Any, method: Any, module: Any) -> None:
        layer = self.layer(module) if self.runtime.settings.enabled else None
        if layer is not None:
            if self.is_set_up_later(layer):
                return
            self.init_prepare_finalize(layer)
        if layer is None or not layer.is_swapped:
            original(method, module)

    def _visit(self, original: None, module: Any) -> None:
        layer = self.layer(module)
        assert layer is not None, "the hook is a method of FusedMoE"
        self.init_prepare_finalize(layer)

    def layer(self, module: Any) -> MoELayer | None:
        if not isinstance(module, vllm_layer.FusedMoE):
            return None
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        return FusedMoELayer(module, max_num_batched_tokens=limit, unquantized=self.unquantized)

    def layers(self, model_runner: Any) -> list[MoELayer]:
        drafter = getattr(getattr(model_runner, "drafter", None), "model", None)
        models = unwrapped(model_runner.model, drafter)
        modules = dict.fromkeys(m for model in models for m in model.modules())
        return [found for m in modules if (found := self.layer(m)) is not None]

    @property
    def profile_misses_set_up(self) -> bool:
        return True

    def make_method(self, layer: MoELayer, forward: ModularForward) -> Any:
        return FusedMoEModularMethod(layer.quant_method, forward)

    def tokens_bound(self) -> int | None:
        metadata = get_forward_context().dp_metadata
        return None if metadata is None else int(metadata.max_tokens_across_dp_cpu)

    def expert_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return None if parallel_state._EP is None else parallel_state.get_ep_group().device_group

    def loads_dummy_weights(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def current_config(self, vllm_config: Any) -> AbstractContextManager[Any]:
        return set_current_vllm_config(vllm_config)

"""vLLM 0.28 to 0.33: a `MoERunner` holds `RoutedExperts`, whose quant method builds its own kernel.

vLLM has no communication-buffer set-up of MoE layers here, so the end of `Worker.load_model` is where layers are
visited. What vLLM's readers ask of `moe_kernel` is answered by a real `FusedMoEKernel` built from two views; what runs
at a forward is our own kernel. `compatibility.py` lists what this file relies on.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import (
    FusedMoEModularMethod as VllmFusedMoEModularMethod,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import SettingsError, UnsupportedError
from vllm_moe_modular.modular.experts import Activation, ExpertWeights
from vllm_moe_modular.modular.two_kernels import Kernel
from vllm_moe_modular.selection.problem import Problem
from vllm_moe_modular.vllm_adapter import adapter
from vllm_moe_modular.vllm_adapter.fp8_weights import fp8_quant_config, fp8_scale, fp8_scheme, keep_fp8_weights
from vllm_moe_modular.vllm_adapter.graphs import moe_is_outside_graphs, take_moe_out_of_graphs
from vllm_moe_modular.vllm_adapter.layer import MoELayer, Ranks, make_activation, unwrapped
from vllm_moe_modular.vllm_adapter.method import ModularForward, no_modular_form
from vllm_moe_modular.vllm_adapter.patches import Patch
from vllm_moe_modular.vllm_adapter.runtime import logger, named_parts
from vllm_moe_modular.vllm_adapter.vllm_experts import VllmExperts, why_not_reusable, why_not_transferred

_FORMATS = {
    ActivationFormat.STANDARD: mk.FusedMoEActivationFormat.Standard,
    ActivationFormat.BATCHED: mk.FusedMoEActivationFormat.BatchedExperts,
}


class RoutedExpertsLayer(MoELayer):
    """A `RoutedExperts`, with what its `FusedMoEConfig` says of it."""

    module: Any

    def __init__(
        self, routed_experts: RoutedExperts, runner: MoERunner | None = None, *, vllm_config: Any = None
    ) -> None:
        super().__init__(routed_experts)
        self._runner: Any = runner  # None while the weights are still being loaded
        self._elastic_ep = vllm_config is not None and vllm_config.parallel_config.enable_elastic_ep
        self._receives_weights = getattr(vllm_config, "weight_transfer_config", None) is not None
        self._between_graphs = vllm_config is not None and moe_is_outside_graphs(vllm_config.compilation_config)

    @property
    def name(self) -> str:
        return self.module.layer_name

    @property
    def problem(self) -> Problem:
        config, method, ranks = self.module.moe_config, self.quant_method, self.ranks
        parallel = config.moe_parallel_config
        unquantized = type(method) is UnquantizedFusedMoEMethod
        scheme = "none" if unquantized else fp8_scheme(method)
        return Problem(
            num_experts=config.num_experts,
            num_local_experts=-(-config.num_experts // parallel.ep_size),
            top_k=config.experts_per_token,
            hidden=config.hidden_dim,
            intermediate=config.intermediate_size_per_partition,
            activation=config.activation.value,
            has_bias=config.has_bias,
            dtype=str(config.in_dtype).removeprefix("torch."),
            quant_scheme=scheme or type(method).__name__,
            weights_missing=self.weights_missing if scheme else "",
            router_weight_on_input=self.router_weight_on_input,
            tp_size=ranks.tp_size,
            dp_size=parallel.dp_size,
            pcp_size=parallel.pcp_size,
            ep_size=parallel.ep_size,
            sequence_parallel=parallel.is_sequence_parallel,
            capacity_tokens=config.max_num_tokens,
            cuda_graph=bool(config.max_capture_size) and not self._between_graphs,
            between_graphs=self._between_graphs,
            captured_tokens=0 if self._between_graphs else config.max_capture_size or 0,
            eplb=parallel.enable_eplb,
            lora=config.is_lora_enabled,
            elastic_ep=self._elastic_ep,
            only_vllm_experts=scheme is None,
            vllm_experts=self._vllm_experts,
            irreplaceable="" if scheme else self._vllm_experts,
        )

    @property
    def _vllm_experts(self) -> str:
        method = self.quant_method
        to_be_processed = type(method) is UnquantizedFusedMoEMethod or fp8_scheme(method) is not None
        if to_be_processed and getattr(method, "moe_kernel", None) is None:
            return no_modular_form(method) if getattr(method, "is_monolithic", False) else ""
        return (self._receives_weights and why_not_transferred(method)) or why_not_reusable(method)

    def keep_weights(self) -> None:
        if fp8_scheme(self.quant_method) is not None:
            keep_fp8_weights(self.module)

    def quant_config_of_kept_weights(self, method: Any) -> Any:
        if fp8_scheme(method) is None:
            return super().quant_config_of_kept_weights(method)
        return fp8_quant_config(self.module, method)

    @property
    def weights_missing(self) -> str:
        config = self.module.moe_config
        for size in ("hidden_dim", "intermediate_size_per_partition"):
            stored = getattr(config, f"{size}_unpadded", None)
            if stored is not None and stored != getattr(config, size):
                return (
                    f"vLLM's kernel wants {size} {stored} padded to {getattr(config, size)} and zeroes the padding "
                    "itself; use the vllm experts"
                )
        return super().weights_missing

    def weights(self) -> ExpertWeights:
        weights = super().weights()
        if weights.w13.dtype != torch.float8_e4m3fn:
            return weights
        return replace(weights, w13_scale=fp8_scale(self.module, "w13"), w2_scale=fp8_scale(self.module, "w2"))

    @property
    def ranks(self) -> Ranks:
        parallel = self.module.moe_config.moe_parallel_config
        tp = parallel_state.get_tp_group()
        return Ranks(parallel.ep_rank, parallel.ep_size, tp.rank_in_group, tp.world_size, parallel.is_sequence_parallel)

    @property
    def activation(self) -> Activation | None:
        config = self.module.moe_config
        return make_activation(config.activation.value, config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)

    @property
    def expert_map(self) -> list[int] | None:
        found = self.module.expert_map
        return None if found is None else found.tolist()

    def replace_quant_method(self, method: Any) -> None:
        self.module._replace_quant_method(method)
        # On a CPU vLLM lets Dynamo trace into the layer; our collectives must stay behind an opaque operation.
        ops, runner = torch.ops.vllm, self._runner
        runner._forward_entry = ops.moe_forward if runner._shared_experts is None else ops.moe_forward_shared


class PrepareFinalizeView(mk.FusedMoEPrepareAndFinalizeModular):
    """Answers what vLLM's readers ask of an all-to-all; nothing runs through it."""

    def __init__(self, forward: ModularForward) -> None:
        super().__init__()
        self._forward = forward

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return _FORMATS[self._forward.kernel.prepare_finalize.activation_format]

    def topk_indices_dtype(self) -> torch.dtype | None:
        return self._forward.kernel.topk_indices_dtype

    def max_num_tokens_per_rank(self) -> int | None:
        batched = self.activation_format is mk.FusedMoEActivationFormat.BatchedExperts
        return self._forward.layer.problem.capacity_tokens if batched else None

    def num_dispatchers(self) -> int:
        return self._forward.layer.ranks.ep_size

    def output_is_reduced(self) -> bool:
        return self._forward.output_is_reduced

    def supports_async(self) -> bool:
        return self._forward.kernel.supports_async

    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map,
        apply_router_weight_on_input, quant_config, defer_input_quant,
    ) -> Any:  # fmt: skip
        raise _only_a_view()

    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids,
        apply_router_weight_on_input, weight_and_reduce_impl,
    ) -> None:  # fmt: skip
        raise _only_a_view()


class ExpertsView(mk.FusedMoEExpertsModular):
    """Answers what vLLM's readers ask of an expert kernel; nothing runs through it.

    The required `forward` keeps vLLM's elastic scaling, which rebuilds experts from two arguments, from silently
    putting a view without parts in place.
    """

    def __init__(self, moe_config: Any, quant_config: Any, *, forward: ModularForward) -> None:
        self._format = _FORMATS[forward.kernel.experts.activation_format]
        batched = self._format is mk.FusedMoEActivationFormat.BatchedExperts
        super().__init__(
            moe_config,
            quant_config,
            max_num_tokens=forward.layer.problem.capacity_tokens if batched else None,
            num_dispatchers=forward.layer.ranks.ep_size if batched else None,
        )

    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return self._format

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (None, None)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return make_activation(activation.value, None, None, None) is not None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:  # noqa: ARG004
        return True

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
        return (0,), (0,), (M, K)

    def apply(self, output, hidden_states, w1, w2, *args: Any, **kwargs: Any) -> None:
        raise _only_a_view()


def _only_a_view() -> UnsupportedError:
    return UnsupportedError(
        "calling the parts of a moe_modular layer one by one", instead="call the layer's quant_method.apply"
    )


class FusedMoEModularMethod(VllmFusedMoEModularMethod):
    """vLLM's class of that name, running a kernel of ours."""

    def __init__(self, old_quant_method: Any, forward: ModularForward) -> None:
        super().__init__(old_quant_method, _kernel_view(old_quant_method, forward))
        self.modular_forward = forward

    @property
    def kernel(self) -> Kernel:
        """What runs."""
        return self.modular_forward.kernel

    def process_weights_after_loading(self, layer: Any) -> None:
        """A weight reload: the old method does with the new weights what it did with the first ones."""
        self.old_quant_method.process_weights_after_loading(layer)
        self.weights_were_reloaded()

    def weights_were_reloaded(self) -> None:
        """Take over what the old method made of the new weights."""
        self.moe_quant_config = self.old_quant_method.moe_quant_config
        self.moe_kernel = _kernel_view(self.old_quant_method, self.modular_forward)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H] of this rank's routed experts; runs the shared experts meanwhile where the all-to-all allows."""
        meanwhile = None
        if shared_experts is not None and self.kernel.supports_async:

            def meanwhile() -> None:
                shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)

        return self.modular_forward(x, topk_weights, topk_ids, meanwhile=meanwhile)

    forward_native = forward_cuda = forward_cpu = apply


def _kernel_view(old_quant_method: Any, forward: ModularForward) -> mk.FusedMoEKernel:
    if isinstance(forward.kernel.experts, VllmExperts):  # what vLLM warms up is then what runs
        experts = old_quant_method.moe_kernel.fused_experts
    else:
        experts = ExpertsView(old_quant_method.moe, old_quant_method.moe_quant_config, forward=forward)
    return mk.FusedMoEKernel(PrepareFinalizeView(forward), experts)


class Adapter(adapter.Adapter):
    """The seams of this era."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        return (
            Patch(
                target="vllm.v1.worker.gpu_worker:Worker.load_model",
                wrapper=self.load_model,
                why="the only point after LoRA, EPLB and drafter set-up and before profiling, on every runner",
                upstream="vLLM pull request 50556 would let a prepare/finalize be registered by name",
                remove_when="all-to-alls and experts can both be registered with vLLM",
            ),
            Patch(
                target="vllm.v1.worker.gpu_worker:Worker.execute_model",
                wrapper=self.execute_model,
                why="a step that is replayed from a CUDA graph runs no line of ours, and a lost rank has to be told",
                upstream="vLLM has no hook before a step",
                remove_when="vLLM has one",
            ),
            *(
                Patch(
                    target=f"{method}.process_weights_after_loading",
                    wrapper=self.process_weights,
                    why="vLLM shuffles or prepacks the weights for its own kernel, and the plain layout is lost",
                    upstream="vLLM pull request 53897 would let experts be registered, and be asked for the layout",
                    remove_when="experts can be registered with vLLM",
                )
                for method in (
                    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
                    "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod",
                    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
                    "compressed_tensors_moe_w8a8_fp8:CompressedTensorsW8A8Fp8MoEMethod",
                )
            ),
            Patch(
                target="vllm.config.vllm:VllmConfig.__post_init__",
                wrapper=self.configure,
                why="MoE layers on a part that CUDA graphs cannot capture have to be splitting ops",
                upstream="vLLM turns CUDA graphs off altogether for such a backend of its own",
                remove_when="an all-to-all can say in vLLM that it is not to be captured",
            ),
            Patch(
                target="vllm.v1.worker.gpu_worker:Worker.reload_weights",
                wrapper=self.reload_weights,
                why="vLLM's weight loaders go by the class name of the quant method and would misread some checkpoints",
                upstream="nothing is proposed yet; RoutedExperts.weight_loader compares names",
                remove_when="loaders ask the method instead of comparing its name",
            ),
            Patch(
                target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.init_prepare_finalize",
                wrapper=self._visit,
                adds=True,
                why="the hook has one name on the layer in every era; vLLM has none here",
                upstream="removed in 0.28, when quant methods began to build their own kernels",
                remove_when="vLLM has such a hook again",
            ),
        )

    def configure(self, original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of `VllmConfig.__post_init__`, in every process that makes one: what the named parts need."""
        original(config, *args, **kwargs)
        try:
            settings = adapter.engine_settings(self.environment, config.additional_config)
        except SettingsError:
            return  # the workers say so before they load
        if config.model_config is None or not config.model_config.is_moe:
            return
        if settings.enabled and (told := take_moe_out_of_graphs(config.compilation_config, named_parts(settings))):
            logger.info("moe_modular: %s", told)

    def _visit(self, original: None, runner: MoERunner) -> None:
        self.init_prepare_finalize(self._layer(runner.routed_experts, runner))

    def reload_weights(self, original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of `Worker.reload_weights`: the old methods load and process the new weights."""
        layers = self.layers(worker.model_runner) if self.runtime.settings.enabled else []
        swapped = [(layer, layer.quant_method) for layer in layers if layer.is_swapped]
        for layer, method in swapped:
            layer.replace_quant_method(method.old_quant_method)
        try:
            return original(worker, *args, **kwargs)
        finally:
            with self.current_config(worker.vllm_config):
                for layer, method in swapped:
                    method.weights_were_reloaded()
                    layer.replace_quant_method(method)

    def layer(self, module: Any) -> MoELayer | None:
        return self._layer(module) if isinstance(module, RoutedExperts) else None

    def _layer(self, module: RoutedExperts, runner: MoERunner | None = None) -> MoELayer:
        return RoutedExpertsLayer(module, runner, vllm_config=self.vllm_config)

    def layers(self, model_runner: Any) -> list[MoELayer]:
        drafter = getattr(model_runner, "drafter", None) or getattr(model_runner, "speculator", None)
        models = unwrapped(model_runner.model, getattr(drafter, "model", None))
        runners = dict.fromkeys(m for model in models for m in model.modules() if isinstance(m, MoERunner))
        return [self._layer(runner.routed_experts, runner) for runner in runners]

    @property
    def profile_misses_set_up(self) -> bool:
        return False  # it compares the device's free memory before and after

    def make_method(self, layer: MoELayer, forward: ModularForward) -> FusedMoEModularMethod:
        return FusedMoEModularMethod(layer.quant_method, forward)

    def tokens_bound(self) -> int | None:
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        return None if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())

    def expert_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        return None if parallel_state._EP is None else parallel_state.get_ep_group().device_group

    def current_config(self, vllm_config: Any) -> AbstractContextManager[Any]:
        return set_current_vllm_config(vllm_config)

"""The vLLM releases that are supported: one row per contract, with what the adapter relies on in it.

Nothing here imports vLLM, so any release can be judged from its files.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from vllm_moe_modular.vllm_adapter.contract import Calls, Expectation, Overrides, Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """A range of releases with one contract.

    Attributes:
        module: the adapter, in this folder.
        first, last: releases, inclusive; later patch releases of the last minor count as tested.
        relies_on: what would break the adapter.
    """

    module: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    relies_on: tuple[Expectation, ...]

    def covers(self, version: tuple[int, int, int]) -> bool:
        return self.first <= version and version[:2] <= self.last[:2] and not self.ends_before(version)

    def ends_before(self, version: tuple[int, int, int]) -> bool:
        """Whether the contract changed within the minor release."""
        return self.last < version and any(e.first[:2] == version[:2] and self.last < e.first for e in ERAS)

    def load(self) -> ModuleType:
        """Import the adapter, and with it vLLM."""
        return import_module(f"vllm_moe_modular.vllm_adapter.{self.module}")

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.first))} to {'.'.join(map(str, self.last))}"


_MOE = "vllm.model_executor.layers.fused_moe"
_METHOD = f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase"
_MODULAR = f"{_MOE}.fused_moe_modular_method:FusedMoEModularMethod"
_KERNEL = f"{_MOE}.modular_kernel:FusedMoEKernel"
_RUNNER = f"{_MOE}.runner.moe_runner:MoERunner"
_ROUTED = f"{_MOE}.routed_experts:RoutedExperts"
_UNQUANTIZED = f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
_FP8 = "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod"
_TENSORS_FP8 = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_w8a8_fp8:CompressedTensorsW8A8Fp8MoEMethod"
)

_SINCE_0_28: tuple[Expectation, ...] = (
    Overrides(
        f"{_MODULAR}.apply",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Calls(f"{_MODULAR}.__init__", ("old_quant_method", "moe_kernel")),
    Reads(f"{_MODULAR}.old_quant_method"),
    Reads(f"{_METHOD}.moe_quant_config"),
    Reads(f"{_METHOD}.moe_kernel"),
    Reads(f"{_METHOD}.topk_indices_dtype"),
    Calls(f"{_METHOD}.get_fused_moe_quant_config", ("layer",)),
    Overrides(f"{_UNQUANTIZED}.process_weights_after_loading", ("layer",)),
    Overrides(f"{_FP8}.process_weights_after_loading", ("layer",)),
    Overrides(f"{_TENSORS_FP8}.process_weights_after_loading", ("layer",)),
    Reads(f"{_FP8}.weight_block_size"),
    Reads(f"{_TENSORS_FP8}.weight_block_size"),
    Calls(f"{_KERNEL}.__init__", ("prepare_finalize", "fused_experts")),
    Reads(f"{_KERNEL}.output_is_reduced"),
    Calls(
        f"{_MOE}.modular_kernel:FusedMoEExperts.__init__",
        ("moe_config", "quant_config", "max_num_tokens", "num_dispatchers"),
    ),
    Overrides(
        f"{_MOE}.modular_kernel:FusedMoEPrepareAndFinalizeModular.prepare",
        (
            "a1", "topk_weights", "topk_ids", "num_experts", "expert_map",
            "apply_router_weight_on_input", "quant_config", "defer_input_quant",
        ),
    ),
    Overrides(
        f"{_MOE}.modular_kernel:FusedMoEPrepareAndFinalizeModular.finalize",
        (
            "output", "fused_expert_output", "topk_weights", "topk_ids",
            "apply_router_weight_on_input", "weight_and_reduce_impl",
        ),
    ),
    Calls(f"{_ROUTED}._replace_quant_method", ("quant_method",)),
    Reads(f"{_ROUTED}.expert_map"),
    Reads(f"{_ROUTED}.layer_name"),
    Reads(f"{_RUNNER}.routed_experts"),
    Reads(f"{_RUNNER}._forward_entry"),
    Reads(f"{_RUNNER}._shared_experts"),
    Reads(f"{_MOE}.runner.shared_experts:SharedExpertsOrder.MK_INTERNAL_OVERLAPPED"),
    *(
        Reads(f"{_MOE}.config:FusedMoEConfig.{field}")
        for field in (
            "num_experts", "experts_per_token", "hidden_dim", "intermediate_size_per_partition", "activation",
            "has_bias", "in_dtype", "max_num_tokens", "max_capture_size", "is_lora_enabled", "swiglu_limit",
            "swiglu_alpha", "swiglu_beta", "moe_parallel_config",
        )
    ),
    *(
        Reads(f"{_MOE}.config:FusedMoEParallelConfig.{field}")
        for field in ("dp_size", "pcp_size", "ep_size", "ep_rank", "enable_eplb", "is_sequence_parallel")
    ),
    Calls(f"{_MOE}.config:fp8_w8a8_moe_quant_config", ("w1_scale", "w2_scale", "block_shape")),
    Reads("vllm.config.parallel:ParallelConfig.enable_elastic_ep"),
    Overrides("vllm.config.vllm:VllmConfig.__post_init__", ()),
    Reads("vllm.config.model:ModelConfig.is_moe"),
    Calls("vllm.config.compilation:CompilationConfig.splitting_ops_contain_attention", ()),
    *(
        Reads(f"vllm.config.compilation:CompilationConfig.{field}")
        for field in ("mode", "splitting_ops", "cudagraph_mode", "use_inductor_graph_partition")
    ),
    Overrides("vllm.v1.worker.gpu_worker:Worker.load_model", ("load_dummy_weights",)),
    Overrides("vllm.v1.worker.gpu_worker:Worker.execute_model", ("scheduler_output",)),
    Reads("vllm.config.model:ModelConfig.enable_sleep_mode"),
    Reads("vllm.v1.worker.gpu_worker:Worker.reload_weights"),
    Reads(f"{_MOE}.prepare_finalize.no_dp_ep:MoEPrepareAndFinalizeNoDPEPModular"),
    Reads(f"{_KERNEL}.fused_experts"),
    Reads(f"{_KERNEL}.is_monolithic"),
    Reads("vllm.forward_context:ForwardContext.dp_metadata"),
    Reads("vllm.forward_context:DPMetadata.num_tokens_across_dp_cpu"),
    Reads("vllm.distributed.parallel_state:get_ep_group"),
    Reads("vllm.distributed.parallel_state:get_tp_group"),
)  # fmt: skip

_SINCE_0_24: tuple[Expectation, ...] = (
    *_SINCE_0_28,
    Overrides(f"{_RUNNER}.maybe_init_modular_kernel", ()),
    Reads(f"{_METHOD}.supports_internal_mk"),
)

_LAYER = f"{_MOE}.layer:FusedMoE"

_APPLY_0_11 = (
    "layer", "x", "router_logits", "top_k", "renormalize", "use_grouped_topk", "topk_group", "num_expert_group",
    "global_num_experts", "expert_map", "custom_routing_function", "scoring_func", "routed_scaling_factor",
    "e_score_correction_bias", "apply_router_weight_on_input", "activation", "enable_eplb", "expert_load_view",
    "logical_to_physical_map", "logical_replica_count",
)  # fmt: skip

_BOTH_0_11: tuple[Expectation, ...] = (
    Calls(
        f"{_MOE}.cpu_fused_moe:select_experts",
        (
            "hidden_states", "router_logits", "top_k", "use_grouped_topk", "renormalize", "topk_group",
            "num_expert_group", "custom_routing_function", "scoring_func", "routed_scaling_factor",
            "e_score_correction_bias",
        ),
    ),
    Reads(f"{_LAYER}.select_experts"),
    Reads(f"{_LAYER}.expert_map"),
    Reads(f"{_LAYER}.layer_name"),
    Reads(f"{_LAYER}.moe_parallel_config"),
    Reads(f"{_LAYER}.moe_config"),
    Reads(f"{_LAYER}.is_sequence_parallel"),
    Reads(f"{_LAYER}.shared_experts"),
    Reads(f"{_LAYER}.zero_expert_num"),
    Overrides("vllm.v1.worker.gpu_worker:Worker.load_model", ()),
    Overrides("vllm.v1.worker.gpu_worker:Worker.execute_model", ("scheduler_output",)),
    Reads("vllm.config.model:ModelConfig.enable_sleep_mode"),
    Reads("vllm.forward_context:ForwardContext.dp_metadata"),
    Reads("vllm.forward_context:DPMetadata.max_tokens_across_dp_cpu"),
    Reads("vllm.distributed.parallel_state:get_ep_group"),
    Reads("vllm.distributed.parallel_state:get_tp_group"),
)  # fmt: skip

_0_11_0: tuple[Expectation, ...] = (
    *_BOTH_0_11,
    Overrides(f"{_MOE}.layer:FusedMoEMethodBase.apply", _APPLY_0_11),
    Overrides(f"{_MOE}.layer:FusedMoEMethodBase.init_prepare_finalize", ("layer",)),
    Reads(f"{_MOE}.layer:FusedMoEMethodBase.fused_experts"),
    Reads(f"{_MOE}.layer:FusedMoEMethodBase.topk_indices_dtype"),
    Reads(f"{_MOE}.layer:FusedMoEMethodBase.moe_quant_config"),
    Overrides(f"{_MOE}.layer:UnquantizedFusedMoEMethod.process_weights_after_loading", ("layer",)),
    Reads(f"{_MOE}.config:FusedMoEConfig.use_flashinfer_cutlass_kernels"),
)

_0_11_1: tuple[Expectation, ...] = (
    *_BOTH_0_11,
    Overrides(f"{_MODULAR}.apply", _APPLY_0_11),
    Calls(f"{_MODULAR}.__init__", ("old_quant_method", "experts")),
    Overrides(f"{_LAYER}.maybe_init_modular_kernel", ()),
    Overrides(f"{_UNQUANTIZED}.process_weights_after_loading", ("layer",)),
)

ERAS = (
    Era(module="era_0_11_0", first=(0, 11, 0), last=(0, 11, 0), relies_on=_0_11_0),
    Era(module="era_0_11_1", first=(0, 11, 1), last=(0, 11, 2), relies_on=_0_11_1),
    Era(module="era_0_24", first=(0, 24, 0), last=(0, 27, 1), relies_on=_SINCE_0_24),
    Era(module="era_0_28", first=(0, 28, 0), last=(0, 33, 0), relies_on=_SINCE_0_28),
)

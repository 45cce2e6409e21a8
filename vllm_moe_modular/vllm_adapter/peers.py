"""vLLM's own expert kernels as plain functions, to be measured beside ours.

Relies on vLLM 0.26's names; in a release that has others, the peer says what is missing and is not measured.

    vllm.model_executor.layers.fused_moe.fused_moe: fused_experts, get_moe_configs
    vllm.model_executor.layers.fused_moe.config: biased_moe_quant_config, fp8_w8a8_moe_quant_config, FusedMoEConfig,
        FusedMoEParallelConfig.make_no_parallel, RoutingMethodType
    vllm.model_executor.layers.fused_moe.activation: MoEActivation, apply_moe_activation
    vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe: make_routing_data
    vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe: TritonOrDeepGemmExperts
    vllm.model_executor.layers.fused_moe.modular_kernel: FusedMoEKernel
    vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep: MoEPrepareAndFinalizeNoDPEPModular
    vllm.v1.worker.workspace: init_workspace_manager
    vllm.utils.import_utils: has_triton_kernels; triton_kernels.matmul_ogs, .swiglu
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import torch

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows

Layer = Callable[[StandardRows], torch.Tensor]

_MOE = "vllm.model_executor.layers.fused_moe"


def fused_experts(weights: ExpertWeights, activation: Activation) -> Layer:
    """vLLM's Triton kernel, with the tuned table that it ships for the shape, else its default.

    Raises:
        ImportError: there is no vLLM, or not with these names.
    """
    config = import_module(f"{_MOE}.config")
    kinds = import_module(f"{_MOE}.activation").MoEActivation
    quant_config, kind = None, kinds.SILU
    if weights.w13_scale is not None:
        quant_config = _fp8_config(weights)
    elif weights.w13_bias is not None:
        quant_config = config.biased_moe_quant_config(weights.w13_bias, weights.w2_bias)
    if activation.kind is ActivationKind.SWIGLU_OAI:
        kind = kinds.SWIGLUOAI
    run = import_module(f"{_MOE}.fused_moe").fused_experts
    return lambda rows: run(
        rows.x, weights.w13, weights.w2, rows.topk_weights, rows.topk_ids, activation=kind, quant_config=quant_config
    )


def _fp8_config(weights: ExpertWeights) -> Any:
    return import_module(f"{_MOE}.config").fp8_w8a8_moe_quant_config(
        w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=[128, 128]
    )


def triton_or_deep_gemm(weights: ExpertWeights, top_k: int) -> tuple[Layer, Callable[[int], int]]:
    """vLLM's DeepGEMM experts at its defaults, for fp8 in blocks; and the scratch bytes of a call of so many rows.

    Raises:
        ImportError: there is no vLLM, or not with these names.
        UnsupportedError: weights that are not in fp8.
    """
    if weights.w13_scale is None:
        raise UnsupportedError("bfloat16 in vLLM's DeepGEMM experts", instead="measure it in fp8")
    config, silu = import_module(f"{_MOE}.config"), import_module(f"{_MOE}.activation").MoEActivation.SILU
    E, H, F = weights.w2.shape
    moe_config = config.FusedMoEConfig(
        num_experts=E, experts_per_token=top_k, hidden_dim=H, intermediate_size=F, num_local_experts=E,
        num_logical_experts=E, activation=silu, device=weights.w2.device, in_dtype=torch.bfloat16,
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
    )  # fmt: skip
    experts = import_module(f"{_MOE}.experts.triton_deep_gemm_moe").TritonOrDeepGemmExperts(
        moe_config, _fp8_config(weights)
    )
    nowhere = import_module(f"{_MOE}.prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular()
    kernel = import_module(f"{_MOE}.modular_kernel").FusedMoEKernel(nowhere, experts)
    import_module("vllm.v1.worker.workspace").init_workspace_manager(weights.w2.device)

    def layer(rows: StandardRows) -> torch.Tensor:
        out: torch.Tensor = kernel.apply(
            rows.x, weights.w13, weights.w2, rows.topk_weights, rows.topk_ids, activation=silu, global_num_experts=E,
            expert_map=None, apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    def nbytes(rows: int) -> int:
        first, second, _ = experts.workspace_shapes(rows, 2 * F, H, top_k, E, E, None, silu)
        return 2 * (prod(first) + prod(second))

    return layer, nbytes


def ships_a_table(weights: ExpertWeights) -> bool:
    """Whether vLLM has a tuned table for this shape on this GPU; without one it takes its default."""
    E, _, F = weights.w2.shape
    dtype, block = (None, 0) if weights.w13_scale is None else ("fp8_w8a8", 128)
    return bool(import_module(f"{_MOE}.fused_moe").get_moe_configs(E, F, dtype, block, block))


def matmul_ogs(weights: ExpertWeights, activation: Activation) -> Layer:
    """triton_kernels' two grouped GEMMs as vLLM runs them: routing data, gather, scatter and the weighted sum.

    Raises:
        ImportError: there is no triton_kernels, or not with these names.
        UnsupportedError: fp8 weights.
    """
    if weights.w13_scale is not None:
        raise UnsupportedError("fp8 in blocks of 128 x 128 in matmul_ogs", instead="measure it in bfloat16")
    if not import_module("vllm.utils.import_utils").has_triton_kernels():  # which makes the short name one
        raise ImportError("vLLM carries no triton_kernels")
    ogs = import_module("triton_kernels.matmul_ogs")
    route = import_module(f"{_MOE}.experts.gpt_oss_triton_kernels_moe").make_routing_data
    w13, w2 = weights.w13.mT, weights.w2.mT
    b13, b2 = (None if b is None else b.float() for b in (weights.w13_bias, weights.w2_bias))
    first = partial(_gated, ogs, w13, b13, activation)

    def layer(rows: StandardRows) -> torch.Tensor:
        routing, gather, scatter = route(rows.topk_ids, rows.topk_weights, len(w13))
        activated = first(rows.x, routing, gather)
        out: torch.Tensor = ogs.matmul_ogs(activated, w2, b2, routing, scatter_indx=scatter, gammas=routing.gate_scal)
        return out.view(rows.x.shape)

    return layer


def _gated(
    ogs: Any, w13: torch.Tensor, bias: torch.Tensor | None, activation: Activation, x: torch.Tensor, routing: Any,
    gather: Any,
) -> torch.Tensor:  # fmt: skip
    """The first GEMM and the activation, which only swiglu_oai has fused: [S, F]."""
    if activation.kind is ActivationKind.SWIGLU_OAI:
        swiglu = import_module("triton_kernels.swiglu").swiglu_fn
        specs = ogs.FnSpecs("swiglu", swiglu, ("alpha", "limit"))
        fused = ogs.FusedActivation(specs, (activation.alpha, activation.limit), 2)
        fused_y: torch.Tensor = ogs.matmul_ogs(x, w13, bias, routing, gather_indx=gather, fused_activation=fused)
        return fused_y.view(-1, w13.shape[-1] // 2)
    y = ogs.matmul_ogs(x, w13, bias, routing, gather_indx=gather).view(-1, w13.shape[-1])
    out = y.new_empty(len(y), w13.shape[-1] // 2)
    vllms = import_module(f"{_MOE}.activation")
    vllms.apply_moe_activation(vllms.MoEActivation.SILU, out, y)
    return out

"""What vLLM's readers find on a swapped method, with vLLM's own classes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import (
    FusedMoEModularMethod as VllmFusedMoEModularMethod,
)
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from tests.vllm_adapter.test_method import Layer, Recorder, tokens
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.experts import Activation, ActivationKind
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.vllm_adapter.era_0_28 import FusedMoEModularMethod, RoutedExpertsLayer
from vllm_moe_modular.vllm_adapter.layer import Ranks
from vllm_moe_modular.vllm_adapter.method import ModularForward


class Asynchronous(Recorder):
    supports_async = True


class OldMethod(FusedMoEMethodBase):
    """vLLM's method of the layer, before it was replaced."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.reloads = 0
        self.moe_quant_config = FusedMoEQuantConfig.make()

    def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:  # noqa: ARG002
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: Any) -> None:
        self.reloads += 1
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)


@pytest.fixture
def moe_config() -> Iterator[FusedMoEConfig]:
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=2, ep_size=2, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    with set_current_vllm_config(VllmConfig()):
        yield FusedMoEConfig(
            num_experts=4, experts_per_token=2, hidden_dim=8, intermediate_size=6, num_local_experts=2,
            num_logical_experts=4, activation=MoEActivation.SILU, device="cpu", in_dtype=torch.float32,
            routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel,
        )  # fmt: skip


def swapped(moe: FusedMoEConfig, all2all: Recorder, *, tp_size: int = 1) -> FusedMoEModularMethod:
    experts = TorchExperts(activation=Activation(kind=ActivationKind.SILU))
    kernel = ModularKernel(all2all, experts, allocate=Workspace(torch.device("cpu")))
    layer = Layer(Ranks(0, 2, 0, tp_size, False))
    return FusedMoEModularMethod(OldMethod(moe), ModularForward(kernel, layer, tokens_bound=lambda: None))


def test_readers_find_a_kernel_that_answers_for_ours(moe_config: FusedMoEConfig) -> None:
    method = swapped(moe_config, Recorder())
    assert isinstance(method, VllmFusedMoEModularMethod)
    assert isinstance(method, torch.nn.Module)
    assert not list(method.parameters()), "EPLB walks the parameters"
    assert method.supports_internal_mk, "else the runner gathers all tokens itself"
    assert method.moe_kernel.output_is_reduced()
    assert not method.mk_can_overlap_shared_experts
    assert not method.is_monolithic
    assert method.topk_indices_dtype is None
    assert method.moe_kernel.fused_experts.moe_config is moe_config


def test_slices_leave_the_sum_over_tensor_parallel_ranks_to_the_runner(moe_config: FusedMoEConfig) -> None:
    assert not swapped(moe_config, Recorder(), tp_size=2).moe_kernel.output_is_reduced()


@pytest.mark.parametrize("T", [0, 5])
def test_shared_experts_run_once_on_the_original_hidden_states(moe_config: FusedMoEConfig, T: int) -> None:
    method = swapped(moe_config, Asynchronous())
    assert method.mk_can_overlap_shared_experts
    x, weights, ids = tokens(5)
    original, seen = torch.randn(5, 8), []
    routed = method.apply(None, x[:T], weights[:T], ids[:T], lambda *given: seen.append(given), original)
    assert routed.shape == (T, 8)
    ((given, order),) = seen
    assert given is original
    assert order is SharedExpertsOrder.MK_INTERNAL_OVERLAPPED


def test_shared_experts_are_left_to_the_runner_where_nothing_overlaps(moe_config: FusedMoEConfig) -> None:
    x, weights, ids = tokens(3)
    swapped(moe_config, Recorder()).apply(None, x, weights, ids, lambda *_: pytest.fail("run twice"), x)


def test_reload_goes_through_the_old_method_and_keeps_our_kernel(moe_config: FusedMoEConfig) -> None:
    method = swapped(moe_config, Recorder())
    kernel, view = method.kernel, method.moe_kernel
    method.process_weights_after_loading(None)
    assert method.old_quant_method.reloads == 1
    assert method.kernel is kernel
    assert method.moe_kernel is not view
    assert method.moe_kernel.fused_experts.quant_config is method.old_quant_method.moe_quant_config


def test_the_parts_of_the_view_do_not_run(moe_config: FusedMoEConfig) -> None:
    method = swapped(moe_config, Recorder())
    with pytest.raises(UnsupportedError, match=r"quant_method\.apply"):
        method.moe_kernel.prepare_finalize.prepare(*[None] * 8)


def test_experts_are_not_rebuilt_from_two_arguments(moe_config: FusedMoEConfig) -> None:
    """Elastic scaling does that, and would put a view without parts in place."""
    with pytest.raises(TypeError, match="forward"):
        type(swapped(moe_config, Recorder()).moe_kernel.fused_experts)(moe_config, FusedMoEQuantConfig.make())


def layer_with(moe: FusedMoEConfig, **attributes: Any) -> RoutedExpertsLayer:
    module = SimpleNamespace(moe_config=moe, apply_router_weight_on_input=False, **attributes)
    return RoutedExpertsLayer(module)  # type: ignore[arg-type]


@pytest.fixture
def _tensor_parallel_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))


@pytest.mark.usefixtures("_tensor_parallel_group")
def test_a_linear_method_on_a_moe_layer_is_left_alone(moe_config: FusedMoEConfig) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    problem = layer_with(moe_config, quant_method=UnquantizedLinearMethod()).problem
    assert "UnquantizedLinearMethod has no modular form" in problem.irreplaceable


@pytest.mark.usefixtures("_tensor_parallel_group")
def test_weights_that_a_method_set_to_none_are_a_reason_not_a_crash(moe_config: FusedMoEConfig) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    problem = layer_with(moe_config, quant_method=method, w13_weight=None, w2_weight=torch.zeros(2, 8, 6)).problem
    assert "w13_weight is not a plain [E, N, K] tensor" in problem.weights_missing


@pytest.mark.usefixtures("_tensor_parallel_group")
def test_padding_is_not_read_as_weights(moe_config: FusedMoEConfig) -> None:
    """vLLM rounds sizes up for some kernels, and zeroes what is more only in the processing that we skip."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    moe_config.intermediate_size_per_partition = 128
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    weights = {"w13_weight": torch.zeros(2, 256, 8), "w2_weight": torch.zeros(2, 8, 128)}
    problem = layer_with(moe_config, quant_method=method, **weights).problem
    assert "intermediate_size_per_partition 6 padded to 128" in problem.weights_missing


@pytest.mark.parametrize("backend", ["TRITON", "DEEPGEMM", "FLASHINFER_CUTLASS", "VLLM_CUTLASS"])
def test_kept_weights_of_a_checkpoint_with_static_scales_have_a_quant_config(backend: str) -> None:
    """vLLM's own multiplies the scales of rows and weights, which fit only after the processing that we skip."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    E, F, H = 4, 16, 32
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.fp8_backend, method.weight_scale_name = Fp8MoeBackend[backend], "weight_scale"
    method.moe_block_shape = method.weight_block_size = None
    module = torch.nn.Module()
    module.quant_method = method
    for name, value in {
        "w13_weight": torch.zeros(E, 2 * F, H, dtype=torch.float8_e4m3fn), "w13_weight_scale": torch.ones(E, 2),
        "w2_weight": torch.zeros(E, H, F, dtype=torch.float8_e4m3fn), "w2_weight_scale": torch.ones(E),
        "w13_input_scale": torch.ones(E), "w2_input_scale": torch.ones(E),
    }.items():  # fmt: skip
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    layer = RoutedExpertsLayer(module)
    layer.keep_weights()
    config = layer.quant_config_of_kept_weights(method)
    assert config.w1_scale.shape == (E, 2 * F)
    assert config.w2_scale.shape == (E, H)


@pytest.mark.usefixtures("_tensor_parallel_group")
@pytest.mark.parametrize(("transfers", "says"), [(True, "by the name of the method"), (False, "no modular form")])
def test_weights_that_are_sent_later_are_loaded_by_vllms_method(
    moe_config: FusedMoEConfig, transfers: bool, says: str
) -> None:
    class CompressedTensorsWNA16MoEMethod(OldMethod): ...

    module: Any = SimpleNamespace(moe_config=moe_config, quant_method=CompressedTensorsWNA16MoEMethod(moe_config))
    module.apply_router_weight_on_input = False
    config: Any = VllmConfig()
    if transfers:
        config.weight_transfer_config = SimpleNamespace()
    assert says in RoutedExpertsLayer(module, vllm_config=config).problem.vllm_experts

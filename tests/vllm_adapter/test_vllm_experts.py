"""Reusing what vLLM chose for a layer, and reading its fp8 weights as they were loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.vllm_adapter.fp8_weights import fp8_scale, fp8_scheme, keep_fp8_weights
from vllm_moe_modular.vllm_adapter.vllm_experts import VllmExperts, _copy_of, _inverse, why_not_reusable

CPU = torch.device("cpu")


class ItsExperts:
    def __init__(self, activation_format: mk.FusedMoEActivationFormat) -> None:
        self._format = activation_format

    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return self._format


def method_with(*, monolithic: bool = False, batched: bool = False) -> Any:
    formats = mk.FusedMoEActivationFormat
    experts = ItsExperts(formats.BatchedExperts if batched else formats.Standard)
    return SimpleNamespace(moe_kernel=SimpleNamespace(is_monolithic=monolithic, fused_experts=experts))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (SimpleNamespace(moe_kernel=None), "SimpleNamespace has no modular form here"),
        (SimpleNamespace(), "SimpleNamespace has no modular form here"),
        (method_with(monolithic=True), "ItsExperts routes and runs the experts in one kernel; choose another with"),
        (method_with(batched=True), "ItsExperts takes the batched format; leave --all2all-backend at its default"),
    ],
)
def test_why_a_kernel_cannot_be_reused(method: Any, says: str) -> None:
    assert says in why_not_reusable(method)
    with pytest.raises(UnsupportedError, match=says):
        VllmExperts(SimpleNamespace(quant_method=method), num_experts=2, device=CPU)


def test_a_modular_kernel_of_the_standard_format_can_be_reused() -> None:
    assert why_not_reusable(method_with()) == ""


def test_ids_go_back_to_those_that_vllms_map_takes_to_local_ones() -> None:
    expert_map = [-1, 2, -1, 0, 1, -1]  # as placed round robin, or after balancing
    inverse = _inverse(expert_map, 3)
    assert [expert_map[g] for g in inverse.tolist()] == [0, 1, 2, -1]
    assert inverse.dtype == torch.int32


class Method:
    def __init__(self) -> None:
        self.moe_kernel = "with an all-to-all"
        self.forward = self.forward_native  # as vLLM's operations keep the variant that they dispatch to

    def forward_native(self) -> str:
        return self.moe_kernel


def test_a_copied_method_runs_its_own_kernel_and_leaves_the_original_alone() -> None:
    method = Method()
    alone = _copy_of(method)
    alone.moe_kernel = "alone"
    assert alone.forward() == "alone"
    assert method.forward() == "with an all-to-all"


def fp8_layer(w13_scale: torch.Tensor, w2_scale: torch.Tensor, name: str = "weight_scale") -> torch.nn.Module:
    """E = 3 experts, F = 4, H = 5."""
    layer = torch.nn.Module()
    tensors = {"w13_weight": torch.zeros(3, 8, 5), "w2_weight": torch.zeros(3, 5, 4)}
    tensors |= {f"w13_{name}": w13_scale, f"w2_{name}": w2_scale}
    for key, value in tensors.items():
        layer.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    return layer


def test_scales_of_whole_tensors_become_scales_of_columns() -> None:
    layer = fp8_layer(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([7.0, 8, 9]))
    keep_fp8_weights(layer)
    assert fp8_scale(layer, "w13")[1].tolist() == [3, 3, 3, 3, 4, 4, 4, 4], "gates, then ups"
    assert fp8_scale(layer, "w2").tolist() == [[7] * 5, [8] * 5, [9] * 5]
    keep_fp8_weights(layer)
    assert fp8_scale(layer, "w13").shape == (3, 8)


def test_scales_of_columns_and_of_blocks_stay_as_they_are() -> None:
    columns = fp8_layer(torch.rand(3, 8, 1), torch.rand(3, 5, 1))
    keep_fp8_weights(columns)
    assert torch.equal(fp8_scale(columns, "w13"), columns.w13_weight_scale[:, :, 0])
    assert fp8_scale(columns, "w2").shape == (3, 5)
    blocks = fp8_layer(torch.rand(3, 2, 1), torch.rand(3, 1, 1), name="weight_scale_inv")
    keep_fp8_weights(blocks)
    assert fp8_scale(blocks, "w13") is blocks.w13_weight_scale_inv
    assert fp8_scale(blocks, "w2").shape == (3, 1, 1)


def test_other_methods_have_no_fp8_scheme() -> None:
    assert fp8_scheme(Method()) is None

"""vllm_adapter.graphs on vLLM's own compilation configuration: what a part that cannot be captured changes in it."""

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig

from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter.era_0_28 import Adapter
from vllm_moe_modular.vllm_adapter.graphs import MOE_OPS, moe_is_outside_graphs, take_moe_out_of_graphs


def parts(**names: str) -> list[Part]:
    kinds = {"all2all": PartKind.PREPARE_FINALIZE, "experts": PartKind.EXPERTS}
    return builtin_registry().named({kinds[k]: name for k, name in names.items()})


def compiled(graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **more: Any) -> CompilationConfig:
    given = {"mode": CompilationMode.VLLM_COMPILE, "use_inductor_graph_partition": False} | more
    config = CompilationConfig(cudagraph_mode=graphs, **given)
    if config.splitting_ops is None:
        config.splitting_ops = list(config._attention_ops)
    return config


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE], ids=str
)
def test_a_part_that_cannot_be_captured_runs_between_graphs(mode: CUDAGraphMode) -> None:
    config = compiled(mode)
    told = take_moe_out_of_graphs(config, parts(all2all="deepep_high_throughput", experts="triton"))
    assert "all-to-all deepep_high_throughput cannot be captured" in told
    assert "PIECEWISE" in told
    assert config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert set(MOE_OPS) < set(config.splitting_ops or ())
    assert config.splitting_ops_contain_attention()
    assert moe_is_outside_graphs(config)
    before = list(config.splitting_ops or ())
    assert take_moe_out_of_graphs(config, parts(all2all="deepep_high_throughput")) == ""
    assert config.splitting_ops == before


def test_vllms_transformers_backend_has_an_op_of_its_own_around_its_layers() -> None:
    import_module("vllm.model_executor.models.transformers.moe")  # registers it
    assert torch.ops.vllm.transformers_moe_forward
    assert "vllm::transformers_moe_forward" in MOE_OPS


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (compiled(), {"all2all": "nvlink", "experts": "triton"}),
        (compiled(), {"all2all": "deepep_auto", "experts": "triton"}),
        (compiled(), {"all2all": "auto", "experts": "auto"}),
        (compiled(CUDAGraphMode.NONE), {"all2all": "torch"}),
        (compiled(CUDAGraphMode.FULL, mode=CompilationMode.NONE), {"all2all": "torch"}),
        (compiled(splitting_ops=[]), {"all2all": "torch"}),
        (compiled(use_inductor_graph_partition=True), {"all2all": "torch"}),
    ],
    ids=["captured", "small steps are", "none named", "no graphs", "not compiled", "in one piece", "inductor cuts it"],
)
def test_all_else_stays_as_it_is(config: CompilationConfig, names: dict[str, str]) -> None:
    before = (list(config.splitting_ops or ()), config.cudagraph_mode)
    assert take_moe_out_of_graphs(config, parts(**names)) == ""
    assert (list(config.splitting_ops or ()), config.cudagraph_mode) == before
    assert not moe_is_outside_graphs(config)


def configured(settings: Settings, additional_config: Mapping[str, Any] | None = None, *, is_moe: bool = True) -> bool:
    """Whether MoE layers are outside graphs once vLLM has made its configuration, as on a GPU."""
    config = VllmConfig(additional_config=dict(additional_config or {}))
    config.compilation_config = compiled()
    object.__setattr__(config, "model_config", SimpleNamespace(is_moe=is_moe))  # of a checkpoint, which there is none
    Adapter(settings).configure(lambda _: None, config)
    return moe_is_outside_graphs(config.compilation_config)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (Settings(enabled=True, all2all="torch"), True),
        (Settings(enabled=True), False),
        (Settings(enabled=False, all2all="torch"), False),
    ],
    ids=["named", "auto", "off"],
)
def test_it_follows_the_settings(settings: Settings, changes: bool) -> None:
    assert configured(settings) is changes


def test_the_engines_own_configuration_wins() -> None:
    assert configured(Settings(enabled=True), {"moe_modular": {"all2all": "torch"}})


def test_what_is_wrong_in_it_is_left_to_the_workers_to_say() -> None:
    assert not configured(Settings(enabled=True), {"moe_modular": {"all_to_all": "torch"}})


def test_a_model_without_such_layers_is_left_alone() -> None:
    assert not configured(Settings(enabled=True, all2all="torch"), is_moe=False)

"""The flow that is the same in every era, over layers that stand for vLLM's."""

import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_modular.errors import CapacityError, NoUsablePartError, SettingsError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind, Registry
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter import adapter, agreement, runtime
from vllm_moe_modular.vllm_adapter.layer import MoELayer, Ranks
from vllm_moe_modular.vllm_adapter.method import ModularForward, maybe_make_fused_moe_modular_method

NAMED = Settings(enabled=True, all2all="local", experts="torch")
SINGLE = Problem(num_experts=4, num_local_experts=4, top_k=2, hidden=8, intermediate=6, dtype="float32")


class Layer(MoELayer):
    activation = Activation(kind=ActivationKind.SILU)
    ranks = Ranks(0, 1, 0, 1, False)
    device = torch.device("cpu")
    expert_map = None
    router_weight_on_input = False

    def __init__(self, name: str, problem: Problem = SINGLE) -> None:
        super().__init__(SimpleNamespace(quant_method=object()))  # type: ignore[arg-type]
        self._name, self._problem = name, problem

    @property
    def name(self) -> str:
        return self._name

    @property
    def problem(self) -> Problem:
        return self._problem

    def weights(self) -> ExpertWeights:
        return ExpertWeights(w13=torch.zeros(4, 12, 8), w2=torch.zeros(4, 8, 6))

    def replace_quant_method(self, method: Any) -> None:
        self.module.quant_method = method


class Adapter(adapter.Adapter):
    patches = ()
    profile_misses_set_up = True

    def layer(self, module: Any) -> None: ...

    def layers(self, model_runner: Any) -> list[MoELayer]:
        return list(model_runner)

    def make_method(self, layer: MoELayer, forward: ModularForward) -> Any:  # noqa: ARG002
        return SimpleNamespace(modular_forward=forward)

    def tokens_bound(self) -> None: ...

    def expert_parallel_group(self) -> None: ...

    def current_config(self, vllm_config: Any) -> Any:  # noqa: ARG002
        return nullcontext()


def load(settings: Settings, *layers: Layer, config: Any = None, of: Adapter | None = None) -> Adapter:
    made = of or Adapter(settings)
    made.load_model(lambda worker: None, worker_of(*layers, config=config))  # noqa: ARG005
    return made


def worker_of(*layers: Layer, config: Any = None, ep: bool = False, max_num_batched_tokens: int = 8192) -> Any:
    vllm_config = SimpleNamespace(
        additional_config=config or {},
        parallel_config=SimpleNamespace(enable_expert_parallel=ep),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
    )
    return SimpleNamespace(vllm_config=vllm_config, model_runner=layers)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Alike whether vLLM, which keeps its records from the root logger, was imported or not."""
    monkeypatch.setattr(runtime.logger, "propagate", False)
    runtime.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=runtime.logger.name)
    yield caplog
    runtime.logger.removeHandler(caplog.handler)


def test_layers_are_swapped_and_a_second_visit_changes_nothing() -> None:
    layer = Layer("a")
    made = load(NAMED, layer)
    method = layer.quant_method
    assert layer.is_swapped
    made.init_prepare_finalize(layer)
    assert layer.quant_method is method


def test_one_line_per_outcome(log: pytest.LogCaptureFixture) -> None:
    load(Settings(enabled=True, all2all="local", experts="torch", skip_layers=("b*",)), *map(Layer, ["a", "b1", "b2"]))
    lines = [r.getMessage() for r in log.records]
    assert len(lines) == 2
    assert "1 MoE layer (a): run on local + torch" in lines[0]
    assert "2 MoE layers (b1 to b2): left to vLLM's object: VLLM_MOE_MODULAR_SKIP_LAYERS has b*" in lines[1]


def test_kernels_that_were_not_chosen_are_neither_loaded_nor_warned_of(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: set[str] = set()
    load_part = Part.load
    monkeypatch.setattr(Part, "load", lambda part: (loaded.add(part.target), load_part(part))[1])
    load(NAMED, Layer("a"))
    assert {target.partition(":")[2] for target in loaded} == {"LocalPrepareAndFinalize", "TorchExperts"}
    (line,) = log.records
    assert line.levelno == logging.INFO


def test_a_named_all_to_all_that_gains_nothing_is_run_and_the_log_says_so() -> None:
    """Tensor parallelism alone: all ranks have all tokens."""
    tp2 = replace(SINGLE, num_local_experts=2, tp_size=2, ep_size=2)
    plan = runtime.Runtime(Settings(enabled=True, all2all="allgather"), Device(kind="cpu")).plan("a", tp2)
    assert str(plan.choice) == "allgather + torch"
    assert "asked for by name although every rank already has all tokens, sending them gains nothing" in plan.why


@pytest.mark.parametrize("flag", [{"enable_dbo": True}, {"enable_dbo": False, "ubatch_size": 2}], ids=str)
def test_micro_batches_were_not_tried_and_are_refused_by_name(flag: dict[str, Any]) -> None:
    worker = worker_of(Layer("a"))
    worker.vllm_config.parallel_config = SimpleNamespace(enable_expert_parallel=False, **flag)
    with pytest.raises(NoUsablePartError, match=r"DBO.* was not tried on a modular method; serve without --enable-dbo"):
        Adapter(NAMED).load_model(lambda worker: None, worker)  # noqa: ARG005


def test_a_named_part_is_never_replaced(log: pytest.LogCaptureFixture) -> None:
    layer = Layer("a")
    with pytest.raises(NoUsablePartError, match="nobody to send tokens to; pass --enable-expert-parallel"):
        load(Settings(enabled=True, all2all="allgather"), layer)
    assert not layer.is_swapped
    assert not log.records


def test_a_hidden_size_that_named_experts_do_not_take_stops_the_start_with_the_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "this_device", lambda: Device(kind="cuda", sm=90))
    layer = Layer("a", replace(SINGLE, hidden=200, intermediate=64, dtype="bfloat16"))
    with pytest.raises(NoUsablePartError, match="hidden size 200 on a rank: it takes multiples of 64"):
        load(Settings(enabled=True, experts="deep_gemm"), layer)
    assert not layer.is_swapped


@pytest.mark.parametrize("ep", [False, True], ids=["without expert parallelism", "with it"])
def test_a_slice_smaller_than_a_scale_block_says_enable_expert_parallel(ep: bool) -> None:
    vllms = "The output_size of gate's and up's weight = 96 is not divisible by weight quantization block_n = 128."

    def original(worker: Any) -> None:  # noqa: ARG001
        raise ValueError(vllms)

    with pytest.raises(ValueError, match=re.escape(vllms)) as error:
        Adapter(NAMED).load_model(original, worker_of(ep=ep))
    assert ("enable expert parallel" in "".join(getattr(error.value, "__notes__", []))) is not ep


def test_a_capacity_below_the_schedulers_limit_stops_the_start_with_flag_and_value() -> None:
    layer = Layer("a", replace(SINGLE, capacity_tokens=512))
    worker = worker_of(layer, max_num_batched_tokens=2048)
    with pytest.raises(CapacityError, match=r"a takes 512 .* is 2048; pass --max-num-batched-tokens 512"):
        Adapter(NAMED).load_model(lambda worker: None, worker)  # noqa: ARG005
    assert not layer.is_swapped


class LocalThatKeepsItsContext(LocalPrepareAndFinalize):
    context: BuildContext

    @classmethod
    def build(cls, context: BuildContext) -> "LocalThatKeepsItsContext":
        part = cls(placement=context.placement, rank=context.rank, device=context.device)
        part.context = context
        return part


def test_an_all_to_all_hears_of_experts_that_take_rows_in_fp8_and_is_not_shared_with_others() -> None:
    registry = Registry()
    for part in builtin_registry().of(PartKind.PREPARE_FINALIZE):
        registry.add(replace(part, target=f"{__name__}:LocalThatKeepsItsContext") if part.name == "local" else part)
    for part in builtin_registry().of(PartKind.EXPERTS):
        registry.add(replace(part, fp8_rows=("fp8 128x128",)) if part.name == "torch" else part)
    running = runtime.Runtime(NAMED, registry=registry)
    one_rank = ExpertPlacement.linear(4, 1)
    shapes = [
        ("fp8 128x128", 256, True), ("fp8 128x128", 200, False), ("fp8", 256, False), ("none", 256, False),
        ("fp8 128x128", 256, True),
    ]  # fmt: skip
    parts = []
    for scheme, hidden, in_fp8 in shapes:
        layer = Layer("layer", replace(SINGLE, quant_scheme=scheme, hidden=hidden, dtype="bfloat16"))
        plan = running.plan(layer.name, layer.problem)
        of = SimpleNamespace(runtime=running, tokens_bound=lambda: None, make_method=lambda layer, forward: forward)  # noqa: ARG005
        forward = maybe_make_fused_moe_modular_method(layer, plan, one_rank, of)  # type: ignore[arg-type]
        assert forward is not None
        parts.append(forward.kernel.prepare_finalize)
        assert parts[-1].context.fp8_rows is in_fp8
    assert parts[0] is parts[-1]
    assert parts[0] is not parts[3], "hidden sizes are equal, what is sent is not"


def test_settings_of_one_engine_do_not_reach_the_next() -> None:
    first, second, third = Layer("a"), Layer("a"), Layer("a")
    made = load(Settings(enabled=True), first, config={"moe_modular": {"all2all": "local", "experts": "torch"}})
    load(made.environment, second, of=made)
    load(made.environment, Layer("a"), config={"moe_modular": {"enabled": False}}, of=made)
    load(made.environment, third, config={"moe_modular": {"all2all": "local", "experts": "torch"}}, of=made)
    assert [layer.is_swapped for layer in (first, second, third)] == [True, False, True]


def test_a_pattern_that_skips_nothing_is_told(log: pytest.LogCaptureFixture) -> None:
    load(Settings(enabled=True, all2all="local", experts="torch", skip_layers=("*.layer.0.*",)), Layer("m.layers.0.e"))
    (warning,) = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert "*.layer.0.*, which is the name of no MoE layer here (m.layers.0.e)" in warning


def test_a_part_that_does_not_exist_stops_a_model_without_moe_layers_too() -> None:
    with pytest.raises(NoUsablePartError, match=r"'nope' is not known; known: auto"):
        load(Settings(enabled=True, all2all="nope"))


def test_named_parts_that_no_layer_can_use_stop_the_start() -> None:
    irreplaceable = replace(SINGLE, irreplaceable="vLLM's Fp8MoEMethod has no modular form here")
    with pytest.raises(NoUsablePartError, match="asked for by name, and these MoE layers would stay with vLLM"):
        load(NAMED, Layer("a", irreplaceable))
    mixed = Layer("b")
    load(NAMED, Layer("a", irreplaceable), mixed)
    assert mixed.is_swapped


def test_a_layer_that_only_the_vllm_experts_know_is_left_in_a_mixed_model_and_not_alone() -> None:
    quantised = replace(SINGLE, quant_scheme="AWQMarlinMoEMethod", only_vllm_experts=True)
    with pytest.raises(
        NoUsablePartError, match="AWQMarlinMoEMethod has no modular form here but with the vllm experts"
    ):
        load(NAMED, Layer("a", quantised))
    left, mixed = Layer("a", quantised), Layer("b")
    load(NAMED, left, mixed)
    assert not left.is_swapped
    assert mixed.is_swapped


def test_what_vllm_has_processed_is_planned_anew_and_no_longer_read() -> None:
    """`auto` may have chosen the vllm experts before it was known which kernel vLLM would take."""
    left_to_vllm = Layer("a")
    made = Adapter(Settings(enabled=True))
    load(made.environment, of=made)
    made.layer = lambda module: left_to_vllm if module is left_to_vllm.module else None  # type: ignore[method-assign]
    processed = []
    made.process_weights(lambda _, module: processed.append(module), SimpleNamespace(), left_to_vllm.module)
    assert processed == [left_to_vllm.module]
    assert "vLLM has laid out the weights for its own kernel" in left_to_vllm.weights_missing


def test_weights_that_come_in_the_layout_of_vllms_kernel_are_not_taken_for_the_checkpoints() -> None:
    """As from vLLM's weight cache: its method has to rebuild its kernel."""
    layer = Layer("a")
    made = load(NAMED)
    made.layer = lambda module: layer if module is layer.module else None  # type: ignore[method-assign]
    processed = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Adapter, "weights_come_processed", True)
        made.process_weights(lambda _, module: processed.append(module), SimpleNamespace(), layer.module)
    assert processed == [layer.module]
    assert layer.weights_missing


def test_an_adapter_that_loads_no_model_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes one in the API server and in users' scripts too, before it forks its engine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    Adapter(Settings(enabled=True))


def test_where_ranks_come_and_go_every_layer_is_left_and_nothing_is_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's groups are then none that torch knows, and the ranks have no store in common."""
    monkeypatch.setattr(agreement, "exchange", lambda *_, **__: pytest.fail("nobody would answer"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    layer = Layer("a", replace(SINGLE, ep_size=2, dp_size=2, num_local_experts=2, elastic_ep=True))
    layer.ranks = Ranks(0, 2, 0, 1, False)  # type: ignore[misc]
    made = Adapter(Settings(enabled=True))
    made.expert_parallel_group = SimpleNamespace  # type: ignore[assignment]
    worker = worker_of(layer)
    worker.vllm_config.parallel_config.enable_elastic_ep = True
    made.load_model(lambda worker: None, worker)  # noqa: ARG005
    assert not layer.is_swapped


@pytest.mark.parametrize(("sleeps", "experts", "later"), [(True, "torch", True), (False, "torch", False)])
def test_with_sleep_mode_a_layer_of_ours_is_set_up_outside_the_pool_of_weights(
    sleeps: bool, experts: str, later: bool
) -> None:
    made = load(replace(NAMED, experts=experts))
    made.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=sleeps)
    assert made.is_set_up_later(Layer("a")) is later
    assert not made.is_set_up_later(Layer("a", replace(SINGLE, irreplaceable="it has no modular form")))


@pytest.mark.parametrize(("misses", "counted"), [(True, 7_000), (False, 5_000)])
def test_what_set_up_holds_is_told_to_a_profile_that_misses_it(
    misses: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU there is nothing to tell, and runners have no such count."""
    load(NAMED, Layer("a"))
    allocated = iter([10_000, 12_000])
    monkeypatch.setattr(adapter, "_allocated_bytes", lambda: next(allocated))
    made = Adapter(NAMED)
    made.profile_misses_set_up = misses  # type: ignore[misc]
    runner = Layers([Layer("a")])
    runner.model_memory_usage = 5_000
    worker = worker_of()
    worker.model_runner = runner
    made.load_model(lambda worker: None, worker)  # noqa: ARG005
    assert runner.model_memory_usage == counted


class Layers(list[Layer]):
    """A model runner that has them."""

    model_memory_usage: int


def test_skipping_every_layer_is_no_error_even_with_named_parts() -> None:
    layer = Layer("a")
    load(Settings(enabled=True, all2all="local", experts="torch", skip_layers=("*",)), layer)
    assert not layer.is_swapped


def test_strict_mode_counts_skipped_layers() -> None:
    with pytest.raises(NoUsablePartError, match="VLLM_MOE_MODULAR_STRICT=1"):
        load(Settings(enabled=True, strict=True, skip_layers=("*",)), Layer("a"))


def test_a_misspelt_configuration_key_is_told() -> None:
    with pytest.raises(SettingsError, match="did you mean moe_modular"):
        load(NAMED, Layer("a"), config={"moe_modulr": {"strict": True}})


def test_the_folder_of_tuned_tables_reaches_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, build_kernel = [], runtime.Runtime.build_kernel

    def noted(self: runtime.Runtime, choice: Any, context: Any, **more: Any) -> Any:
        contexts.append(context)
        return build_kernel(self, choice, context, **more)

    monkeypatch.setattr(runtime.Runtime, "build_kernel", noted)
    load(replace(NAMED, tuned=str(tmp_path)), Layer("a"))
    assert [context.tuned for context in contexts] == [str(tmp_path)]


def test_a_folder_of_tuned_tables_that_is_none_stops_before_loading(tmp_path: Path) -> None:
    loaded: list[bool] = []
    made = Adapter(Settings(enabled=True, tuned=str(tmp_path / "missing")))
    with pytest.raises(SettingsError, match=r"VLLM_MOE_MODULAR_TUNED=.*no such folder"):
        made.load_model(lambda _worker: loaded.append(True), worker_of())
    assert not loaded


def test_a_trace_folder_that_cannot_be_made_stops_before_loading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loaded: list[bool] = []
    made = Adapter(Settings(enabled=True, trace=str(tmp_path / "file")))
    with pytest.raises(SettingsError, match=r"VLLM_MOE_MODULAR_TRACE=.*name a folder"):
        made.load_model(lambda _worker: loaded.append(True), worker_of())
    assert not loaded


def test_a_lost_rank_is_told_before_a_step_that_may_be_a_replay() -> None:
    made, ran = load(NAMED, Layer("a")), []
    (part,) = [p for p in made.runtime._parts.values() if isinstance(p, LocalPrepareAndFinalize)]
    part.raise_if_lost = lambda: ran.append("asked")  # type: ignore[method-assign]
    assert made.execute_model(lambda _, step: ran.append(step) or "output", object(), "step") == "output"
    assert ran == ["asked", "step"]

"""The flow that is the same in every vLLM era: agree, plan, load, commit. An era's file fills in the seams."""

import difflib
import re
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import CapacityError, NoUsablePartError, SettingsError
from vllm_moe_modular.selection.problem import Device
from vllm_moe_modular.selection.registry import Registry
from vllm_moe_modular.settings import ADDITIONAL_CONFIG_KEY, Settings, with_overrides
from vllm_moe_modular.vllm_adapter.agreement import agree_on_layer, agree_on_settings
from vllm_moe_modular.vllm_adapter.layer import MoELayer
from vllm_moe_modular.vllm_adapter.method import ModularForward, maybe_make_fused_moe_modular_method
from vllm_moe_modular.vllm_adapter.patches import Patch
from vllm_moe_modular.vllm_adapter.report import Report
from vllm_moe_modular.vllm_adapter.runtime import Plan, Runtime, logger

_PLAN = "_moe_modular_plan"  # kept with a layer
_SLICE = re.compile(r"(gate's and up's|down's) weight = \d+ is not divisible by weight quantization block")


class Adapter(ABC):
    """Ties the common code to one era, for one process.

    Args:
        settings: of this process's environment.
    """

    def __init__(self, settings: Settings) -> None:
        self.environment = settings
        # Of the model that is being loaded. Off until then: vLLM makes adapters in processes that load none, where CUDA
        # must not be initialised, for which `Runtime` asks the device.
        self.runtime = Runtime(replace(settings, enabled=False), device=Device(kind="cpu"), registry=Registry())
        self.vllm_config: Any = None  # of the model that is being loaded
        self._loads = 0
        self._held_bytes = 0  # by what was built for the model, of memory that torch manages

    @property
    def splits_steps(self) -> bool:
        """Whether vLLM runs a step as micro-batches."""
        parallel = getattr(self.vllm_config, "parallel_config", None)
        # 0.11 has the first flag only.
        return bool(getattr(parallel, "enable_dbo", False)) or getattr(parallel, "ubatch_size", 0) > 1

    @property
    @abstractmethod
    def patches(self) -> tuple[Patch, ...]:
        """What is changed in vLLM."""

    @abstractmethod
    def layer(self, module: Any) -> MoELayer | None:
        """The layer that owns the weights `module`; None if it is not one of a MoE layer."""

    @abstractmethod
    def layers(self, model_runner: Any) -> list[MoELayer]:
        """Every MoE layer of the model, and of the drafter if there is one."""

    @abstractmethod
    def make_method(self, layer: MoELayer, forward: ModularForward) -> Any:
        """This era's `FusedMoEModularMethod`."""

    @abstractmethod
    def tokens_bound(self) -> int | None:
        """The largest token count of any data-parallel rank in this step; None without data parallelism."""

    @abstractmethod
    def expert_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks over which experts are spread; None where a model has none."""

    @abstractmethod
    def current_config(self, vllm_config: Any) -> AbstractContextManager[Any]:
        """vLLM's context in which its modules may be constructed."""

    @property
    def weights_come_processed(self) -> bool:
        """Whether what is being loaded is in the layout of vLLM's kernel already (weight cache of 0.32)."""
        from vllm.model_executor import utils

        return bool(getattr(utils, "is_weights_pre_processed", bool)())

    @property
    @abstractmethod
    def profile_misses_set_up(self) -> bool:
        """Whether vLLM's memory profile takes no notice of what torch allocated between the weights and the profile."""

    def load_model(self, original: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of `Worker.load_model`: agree on the settings, load, then visit every MoE layer.

        Raises:
            AgreementError: the ranks are not configured alike.
            NoUsablePartError: a named part does not fit, or strict mode and a layer stays with vLLM.
            SettingsError: the engine's own configuration has a key or a value that is not known.
        """
        settings = engine_settings(self.environment, worker.vllm_config.additional_config)
        self.runtime = Runtime(settings, load=self._loads)
        if not self.runtime.settings.enabled:
            original(worker, *args, **kwargs)
            return
        require_folders(self.runtime.settings)
        if not self.resizes_group(worker.vllm_config):  # else every layer stays with vLLM
            agree_on_settings(self.runtime, self.expert_parallel_group())
        self._loads += 1
        self._held_bytes = 0
        self.vllm_config = worker.vllm_config
        try:
            original(worker, *args, **kwargs)
        except ValueError as error:
            if _SLICE.search(str(error)) and not worker.vllm_config.parallel_config.enable_expert_parallel:
                error.add_note(
                    "moe_modular: that is the slice of each expert that a rank would hold; enable expert parallel "
                    "(--enable-expert-parallel), so that a rank holds whole experts"
                )
            raise
        if self.loads_dummy_weights(*args, **kwargs):
            return
        with self.current_config(worker.vllm_config):
            self.commit(self.layers(worker.model_runner))
        if self._held_bytes and self.profile_misses_set_up:  # none on a CPU, whose runners keep no such count
            worker.model_runner.model_memory_usage += self._held_bytes

    def execute_model(self, original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of `Worker.execute_model`: in a step that is replayed from a graph, nobody else of ours asks.

        Raises:
            RankLostError: a rank did not take part in an earlier step in time.
        """
        self.runtime.raise_if_lost()
        return original(worker, *args, **kwargs)

    def loads_dummy_weights(self, *args: Any, **kwargs: Any) -> bool:
        """Whether this load is that of an elastic scale-up, whose weights come later."""
        return bool(kwargs.get("load_dummy_weights", args[0] if args else False))

    def resizes_group(self, vllm_config: Any) -> bool:
        """Whether ranks come and go: vLLM's groups are then none that torch knows, with no store in common."""
        return bool(getattr(vllm_config.parallel_config, "enable_elastic_ep", False))

    def process_weights(self, original: Any, method: Any, module: Any) -> None:
        """In the place of a quant method's `process_weights_after_loading`: keep what our experts will read."""
        layer = self.layer(module) if self.runtime.settings.enabled else None
        if layer is not None and not self.weights_come_processed and self.plan(layer).needs_raw_weights:
            layer.keep_weights()
            method.moe_quant_config = layer.quant_config_of_kept_weights(method)
            return
        original(method, module)
        if layer is not None:  # planned anew at commit: only now is it known what vLLM runs the layer on
            layer.weights_were_processed()
            if hasattr(module, _PLAN):
                delattr(module, _PLAN)

    def is_set_up_later(self, layer: MoELayer) -> bool:
        """Whether the communicator comes too early for a layer of ours, which the end of `load_model` then visits.

        It comes inside the memory pool that sleep mode discards with the weights; what parts hold is in no checkpoint.
        """
        sleeps = getattr(self.vllm_config.model_config, "enable_sleep_mode", False)
        return bool(sleeps) and self.plan(layer).choice is not None

    def plan(self, layer: MoELayer) -> Plan:
        """The plan of `layer`, made at the first call and kept with it.

        Raises:
            NoUsablePartError: a part that the user named cannot run the layer.
        """
        plan = getattr(layer.module, _PLAN, None)
        if plan is None:
            problem = replace(layer.problem, micro_batches=self.splits_steps)
            plan = self.runtime.plan(layer.name, problem)
            setattr(layer.module, _PLAN, plan)
        return plan

    def init_prepare_finalize(self, layer: MoELayer) -> None:
        """Swap the layer's quant method for a modular one, if its plan says so; a second visit changes nothing.

        Raises:
            AgreementError: the ranks would run different parts; nothing was swapped then.
            CapacityError: vLLM set the layer up for fewer tokens than it will send.
        """
        if layer.is_swapped:
            return
        plan = self.plan(layer)
        self._require_capacity(layer, plan)
        method = None
        if not plan.problem.elastic_ep:
            placement = agree_on_layer(layer, plan, self.runtime)
            held_before = _allocated_bytes()
            method = maybe_make_fused_moe_modular_method(layer, plan, placement, self)
            self._held_bytes += _allocated_bytes() - held_before
        if method is None:
            outcome = f"left to vLLM's {type(layer.quant_method).__name__}: {plan.why}"
        else:
            layer.replace_quant_method(method)
            outcome = f"run on {plan.choice} ({plan.why})"
            self._report(layer, plan, method.modular_forward)
        self.runtime.record(outcome, layer.name)

    def _require_capacity(self, layer: MoELayer, plan: Plan) -> None:
        limit, capacity = self.vllm_config.scheduler_config.max_num_batched_tokens, plan.problem.capacity_tokens
        if plan.choice is not None and capacity < limit:
            raise CapacityError(
                f"{layer.name} takes {capacity} tokens in a step, --max-num-batched-tokens is {limit}; "
                f"pass --max-num-batched-tokens {capacity}"
            )

    def commit(self, layers: Sequence[MoELayer]) -> None:
        """Visit every MoE layer of a loaded model, then say what was done.

        Raises:
            NoUsablePartError: strict mode, and a layer stays with vLLM; the message has every layer's reason.
        """
        plans = {layer.name: self.plan(layer) for layer in layers}
        left = {name: plan.why for name, plan in plans.items() if plan.choice is None}
        if self.runtime.settings.strict and left:
            raise NoUsablePartError(_left_message("VLLM_MOE_MODULAR_STRICT=1", left))
        if self.runtime.names_parts and plans and all(p.choice is None and not p.skipped for p in plans.values()):
            raise NoUsablePartError(_left_message("parts were asked for by name", left))
        self._warn_of_idle_patterns(plans)
        for layer in layers:
            self.init_prepare_finalize(layer)
        self.runtime.workspace.lock()
        self.runtime.summarise()

    def _warn_of_idle_patterns(self, names: Iterable[str]) -> None:
        """A pattern that skips nothing is most likely misspelt; on a pipeline rank it may be another rank's."""
        for pattern in self.runtime.settings.skip_layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                logger.warning(
                    "moe_modular: VLLM_MOE_MODULAR_SKIP_LAYERS has %s, which is the name of no MoE layer here (%s)",
                    pattern,
                    ", ".join(names) or "there are none",
                )

    def _report(self, layer: MoELayer, plan: Plan, forward: ModularForward) -> None:
        if self.runtime.settings.trace is None:
            return
        if self.runtime.report is None:
            process = dist.get_rank() if dist.is_initialized() else 0
            self.runtime.report = Report(
                Path(self.runtime.settings.trace),
                rank=layer.ranks.ep_rank,
                size=layer.ranks.ep_size,
                process=process,
                every=self.runtime.settings.trace_every,
            )
        assert plan.choice is not None, "a layer is reported once it was swapped"
        names = plan.choice.all2all.name, plan.choice.experts.name
        num_experts = plan.problem.num_local_experts
        self.runtime.report.add_layer(layer.name, *names, forward.kernel, num_experts=num_experts)


def engine_settings(settings: Settings, additional_config: Any) -> Settings:
    """`settings` with what the engine's own configuration says.

    Raises:
        SettingsError: it has a key or a value that is not known.
    """
    given = additional_config if isinstance(additional_config, dict) else {}
    for key in given:
        if key != ADDITIONAL_CONFIG_KEY and difflib.get_close_matches(key, [ADDITIONAL_CONFIG_KEY], cutoff=0.85):
            raise SettingsError(f"--additional-config has the key {key}; did you mean {ADDITIONAL_CONFIG_KEY}?")
    config = given.get(ADDITIONAL_CONFIG_KEY)
    return settings if config is None else with_overrides(settings, config)


def require_folders(settings: Settings) -> None:
    """Make the trace folder, and look for that of tuned tables, before anything is loaded.

    Raises:
        SettingsError: the one cannot be made or written to, the other is not there.
    """
    if settings.tuned is not None and (why := _why_no_folder(settings.tuned)):
        raise SettingsError(f"VLLM_MOE_MODULAR_TUNED={settings.tuned}: {why}; name the folder that the tables are in")
    if settings.trace is None:
        return
    try:
        Path(settings.trace).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.trace):
            pass
    except OSError as error:
        raise SettingsError(
            f"VLLM_MOE_MODULAR_TRACE={settings.trace}: {error.strerror}; name a folder that can be written to"
        ) from error


def _why_no_folder(name: str) -> str:
    """Empty: it is one."""
    try:
        return "" if stat.S_ISDIR(Path(name).stat().st_mode) else "it is a file"
    except OSError as error:
        return "there is no such folder" if isinstance(error, FileNotFoundError) else str(error.strerror)


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _left_message(why: str, left: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = "\n".join(f"  {len(names)} layers ({names[0]} ...): {reason}" for reason, names in by_reason.items())
    return (
        f"{why}, and these MoE layers would stay with vLLM:\n{reasons}\n"
        "name parts that fit, or leave the choice to auto without VLLM_MOE_MODULAR_STRICT; without a server "
        "'vllm-moe-modular explain MODEL' with --dp, --tp and --gpu tells the same"
    )

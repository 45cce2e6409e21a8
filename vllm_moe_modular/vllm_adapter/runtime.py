"""What is kept for one model in one process: settings, parts, plans, and the objects that layers share."""

import logging
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import PermuteExpertsUnpermute
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.prepare_finalize import PrepareAndFinalize
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.two_kernels import Kernel, TwoKernels
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import BrokenPart, Part, PartKind, Registry
from vllm_moe_modular.selection.select import AUTO, Choice, Selection, require_known, select
from vllm_moe_modular.selection.third_party import full_registry
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter.report import Report

logger = logging.getLogger("vllm.moe_modular")  # below "vllm", so that vLLM's handler and level apply


@dataclass(frozen=True, slots=True)
class Plan:
    """What a layer will run on, decided before its weights are processed.

    Attributes:
        problem: the layer.
        choice: the parts, or None: the layer stays with vLLM.
        why: the reason, one line.
    """

    problem: Problem
    choice: Choice | None
    why: str
    skipped: bool = False  # the user asked for that

    @property
    def needs_raw_weights(self) -> bool:
        """vLLM must not shuffle or prepack the weights for its own kernel."""
        return self.choice is not None and self.choice.experts.raw_weights


@dataclass(slots=True)
class Runtime:
    """One per model that is loaded.

    Layers of the same shape and placement share an all-to-all, all of them the workspace.
    """

    settings: Settings
    device: Device = field(default_factory=lambda: this_device())
    registry: Registry = field(default_factory=lambda: full_registry(import_targets=True))
    load: int = 0  # how many models this process has loaded before
    hosts: int = 1  # that the expert-parallel ranks are spread over
    missing: dict[str, list[str]] | None = None  # by part target: modules that some rank lacks, once ranks were asked
    group: RankGroup | None = None
    report: Report | None = None
    outcomes: dict[str, list[str]] = field(default_factory=dict)  # what was done -> layer names
    visits: dict[str, int] = field(default_factory=dict)  # layer name -> times agreed on
    workspace: Workspace = field(init=False)  # of all layers
    _parts: dict[Any, Any] = field(default_factory=dict)
    _broken_to_tell: list[BrokenPart] = field(init=False)

    def __post_init__(self) -> None:
        self._broken_to_tell = list(self.registry.broken)
        self.workspace = Workspace(torch.device(self.device.kind))

    def missing_of_parts(self) -> dict[str, list[str]]:
        """By target, for every part that is known to this process: what it lacks of it."""
        parts = [p for kind in PartKind for p in self.registry.of(kind)]
        return {p.target: [f"module {m}" for m in p.missing_modules()] for p in parts}

    def plan(self, name: str, problem: Problem) -> Plan:
        """Choose the parts of a layer.

        Raises:
            NoUsablePartError: the user named a part, and it cannot run the layer; every reason is in the message.
        """
        pattern = next((p for p in self.settings.skip_layers if fnmatchcase(name, p)), None)
        if pattern is not None:
            return Plan(problem, None, f"VLLM_MOE_MODULAR_SKIP_LAYERS has {pattern}", skipped=True)
        if problem.irreplaceable:
            return Plan(problem, None, problem.irreplaceable)
        problem = replace(problem, hosts=self.hosts)
        selection = self._select(problem)
        if selection.choice is None:
            if self.names_parts and problem.only_vllm_experts:  # in a model that has other layers too
                why = f"vLLM's {problem.quant_scheme} has no modular form here but with the vllm experts"
                return Plan(problem, None, f"{why}; the layer stays with vLLM")
            if self.names_parts:
                selection.require()
            return Plan(problem, None, selection.why_not)
        return Plan(problem, selection.choice, self._reason(selection))

    @property
    def names_parts(self) -> bool:
        """Whether the user named a part."""
        return {self.settings.all2all, self.settings.experts} != {AUTO}

    @property
    def asked_for(self) -> dict[PartKind, str]:
        """A part's name of each kind, or "auto"."""
        return {PartKind.PREPARE_FINALIZE: self.settings.all2all, PartKind.EXPERTS: self.settings.experts}

    def part_names(self) -> dict[str, list[str]]:
        """By kind, the parts that this process knows."""
        return {kind.value: [p.name for p in self.registry.of(kind)] for kind in PartKind}

    def require_known_names(self) -> None:
        """Check, before anything is loaded, that the parts that were asked for exist.

        Raises:
            NoUsablePartError: one does not, or is broken.
        """
        for kind, name in self.asked_for.items():
            require_known(self.registry, kind, name)

    def _select(self, problem: Problem) -> Selection:
        return select(
            self.registry,
            problem,
            self.device,
            all2all=self.settings.all2all,
            experts=self.settings.experts,
            missing=self.missing,
        )

    def _reason(self, selection: Selection) -> str:
        reasons = []
        for kind, verdicts in selection.verdicts.items():
            name = selection.asked_for[kind]
            fits = ", ".join(v.part.name for v in verdicts if v.usable(name))
            against = [why.partition(";")[0] for v in verdicts if v.part.name == name for why in v.reservations]
            named = f"{kind.value} asked for by name" + (f" although {', '.join(against)}" if against else "")
            reasons.append(named if name != AUTO else f"{kind.value} first of {fits}")
        return "; ".join(reasons)

    def build_kernel(self, choice: Choice, context: BuildContext, *, most_small: int) -> Kernel:
        """The kernel for a layer; its all-to-all and its experts are shared where the context is the same.

        Args:
            most_small: tokens of the fullest rank up to which a step is small, where such have parts of their own.
        """
        kernel = self._build_kernel(choice, context)
        if choice.small is None:
            return kernel
        return TwoKernels(small=self._build_kernel(choice.small, context), large=kernel, most_small=most_small)

    def _build_kernel(self, choice: Choice, context: BuildContext) -> ModularKernel:
        all2all: PrepareAndFinalize[Any] = self._shared(choice.all2all, context)
        experts: PermuteExpertsUnpermute = self._shared(choice.experts, context)
        on_error = None if self.group is None else self.group.say_raised
        return ModularKernel(all2all, experts, allocate=self.workspace, on_error=on_error)

    def _shared(self, part: Any, context: BuildContext) -> Any:
        context = context if part.per_layer else replace(context, layer=None)
        key = (part.target, context)
        if key not in self._parts:
            self._parts[key] = part.load().build(context)
        return self._parts[key]

    def raise_if_lost(self) -> None:
        """Of every all-to-all of the model's layers.

        Raises:
            RankLostError: a rank did not take part in an earlier step in time.
        """
        for part in self._parts.values():
            if isinstance(part, PrepareAndFinalize):
                part.raise_if_lost()

    def record(self, outcome: str, layer_name: str) -> None:
        """Remember what was done with a layer, for the summary."""
        self.outcomes.setdefault(outcome, []).append(layer_name)

    def require_group(self) -> RankGroup:
        """The group that shares experts, once the ranks agreed on their settings."""
        assert self.group is not None, "the ranks agree on their settings before any layer is visited"
        return self.group

    def summarise(self) -> None:
        """One INFO line per distinct outcome, and one of warning per broken part, on the first rank, once."""
        if self.group is not None and self.group.rank != 0:
            self.outcomes.clear()
            self._broken_to_tell = []
        for broken in self._broken_to_tell:
            logger.warning("moe_modular: %s", broken)
        self._broken_to_tell = []
        for outcome, names in self.outcomes.items():
            first, last = names[0], names[-1]
            which = first if len(names) == 1 else f"{first} to {last}"
            logger.info("moe_modular: %d MoE layer%s (%s): %s", len(names), "s"[: len(names) > 1], which, outcome)
        self.outcomes.clear()


def named_parts(settings: Settings) -> list[Part]:
    """The parts that the user named, of those that are known here."""
    return full_registry().named({PartKind.PREPARE_FINALIZE: settings.all2all, PartKind.EXPERTS: settings.experts})


def this_device() -> Device:
    """The accelerator of this process, or the CPU."""
    if not torch.cuda.is_available():
        return Device(kind="cpu")
    major, minor = torch.cuda.get_device_capability()
    gpus = range(torch.cuda.device_count())
    peers = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
    return Device(kind="cuda", sm=10 * major + minor, peer_access=peers)

"""Parts by name. One entry per part; importing this module imports no kernel, no torch and no vLLM."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.selection.problem import Device, Problem

Check = Callable[[Problem, Device], str | None]
"""None = fine; else one sentence with the value, the limit and the remedy. A check that raises is a bug."""

_FP8_ROW_GROUP = 128
"""Columns of a row in fp8 that share a scale: `StandardRows.x_scale`."""

_GPU = Device(kind="cuda", sm=90, peer_access=True)
_IN_NO_GRAPH = Problem(num_experts=8, num_local_experts=4, top_k=2, hidden=2048, intermediate=768, dp_size=2, ep_size=2)

THIS_DISTRIBUTION = "vllm-moe-modular"


class PartKind(Enum):
    PREPARE_FINALIZE = "all-to-all"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is known of a part before it is imported.

    Attributes:
        name: what users type.
        target: "package.module:Class" with a classmethod `build(context)`, imported only once chosen.
        reduces: for experts, where the top-k weight and reduce may be done; for an all-to-all, where it must be.
        preference: lower is preferred, by `auto` among those that fit and in what is suggested by name.
        summary: one line for tables.
        checks: reasons why it cannot run a problem.
        declines: reasons why `auto` leaves it out although it could run; who names the part gets it.
        requires: modules that must be importable; "a or b": one of them.
        raw_weights: needs the weights as the checkpoint stores them.
        small_steps: for an all-to-all of two, the name of the one that takes small steps, with experts of its own; all
            else that is said here is of the one that takes the others.
        per_layer: is built for one layer and sees the server's object of it; else layers of one shape share an object.
        fp8_rows: of experts, the quant schemes with which they take rows in fp8 and would quantise them so anyway.
        provided_by: the installed distribution that it came with.
    """

    name: str
    kind: PartKind
    target: str
    activation_format: ActivationFormat
    reduces: frozenset[str]
    preference: int
    summary: str
    checks: tuple[Check, ...] = ()
    declines: tuple[Check, ...] = ()
    requires: tuple[str, ...] = ()
    raw_weights: bool = False
    small_steps: str = ""
    per_layer: bool = False
    fp8_rows: tuple[str, ...] = ()
    provided_by: str = THIS_DISTRIBUTION

    @property
    def label(self) -> str:
        """The name, and whose it is where it is not ours."""
        return self.name if self.provided_by == THIS_DISTRIBUTION else f"{self.name} (from {self.provided_by})"

    def objections(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """All of them: who mends one should not discover the next by running again."""
        return tuple(why for check in self.checks if (why := check(problem, device)))

    def reservations(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Why `auto` leaves it out."""
        return tuple(why for check in self.declines if (why := check(problem, device)))

    @property
    def cannot_be_captured(self) -> str:
        """What its checks have against CUDA graphs, without the remedy; empty: they can capture it."""
        free = set(self.objections(_IN_NO_GRAPH, _GPU))
        said = self.objections(replace(_IN_NO_GRAPH, cuda_graph=True), _GPU)
        return next((why.partition(";")[0] for why in said if why not in free), "")

    def takes_fp8_rows(self, problem: Problem) -> bool:
        """Whether an all-to-all may send a layer's rows to these experts in fp8."""
        return problem.quant_scheme in self.fp8_rows and problem.hidden % _FP8_ROW_GROUP == 0

    def missing_modules(self) -> tuple[str, ...]:
        """Of `requires`, what is not installed in this process."""
        return tuple(m for m in self.requires if not any(map(_is_installed, m.split(" or "))))

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


def _is_installed(module: str) -> bool:
    """Whether it is there; looked for without importing the packages that it lies in, which may take seconds."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPart:
    """A part that a third party announced and that could not be registered.

    Attributes:
        name: of its entry point, which is what users type.
        provided_by: the distribution that announced it.
        why: what went wrong and whom to tell.
    """

    kind: PartKind
    name: str
    provided_by: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name!r} of {self.provided_by} cannot be used: {self.why}"


@dataclass(slots=True)
class Registry:
    """All parts, ours and third parties'.

    Attributes:
        broken: what third parties announced and could not be registered.
    """

    broken: list[BrokenPart] = field(default_factory=list)
    _parts: dict[tuple[PartKind, str], Part] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Register `part`.

        Raises:
            ValueError: the name is taken.
        """
        key = (part.kind, part.name)
        if key in self._parts:
            raise ValueError(
                f"{part.kind.value} {part.name!r} ({part.target}) is already registered by {self._parts[key].target}; "
                "give the part another name"
            )
        self._parts[key] = part

    def add_all(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self.add(part)

    def broken_named(self, kind: PartKind, name: str) -> list[BrokenPart]:
        """Those that a user means by `name`."""
        return [b for b in self.broken if (b.kind, b.name) == (kind, name)]

    def named(self, names: Mapping[PartKind, str]) -> list[Part]:
        """The parts that a user named, by kind, of those that are known; "auto" names none."""
        return [part for (kind, name), part in self._parts.items() if names.get(kind) == name]

    def of(self, kind: PartKind) -> Iterator[Part]:
        """The parts of one kind, best first."""
        return iter(sorted((p for p in self._parts.values() if p.kind is kind), key=lambda p: (p.preference, p.name)))

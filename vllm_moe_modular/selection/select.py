"""Choosing a pair of parts; the answer explains itself. No logging, no environment, no torch, no vLLM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_moe_modular.errors import NoUsablePartError
from vllm_moe_modular.selection.problem import LAID_OUT, Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind, Registry

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One part against one problem."""

    part: Part
    objections: tuple[str, ...]
    reservations: tuple[str, ...]

    def usable(self, asked_for: str) -> bool:
        """Reservations bind `auto` alone."""
        return not self.objections and (asked_for == self.part.name or not self.reservations)


@dataclass(frozen=True, slots=True)
class Choice:
    """A pair that fits.

    Attributes:
        small: the pair that takes small steps, where the all-to-all is one of two.
    """

    all2all: Part
    experts: Part
    small: "Choice | None" = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them."""
        return (self.all2all, self.experts, *(() if self.small is None else self.small.parts))

    @property
    def needs(self) -> tuple[str, ...]:
        """Modules, each once; "a or b": one of them."""
        return tuple(dict.fromkeys(module for part in self.parts for module in part.requires))

    @property
    def to_install(self) -> tuple[str, ...]:
        """Of `needs` what does not come with a torch for GPUs."""
        return tuple(module for module in self.needs if module != "triton")

    def takes_fp8_rows(self, problem: Problem) -> bool:
        """Whether rows may be sent in fp8: what the experts of every pair take."""
        rest = self.small is None or self.small.takes_fp8_rows(problem)
        return rest and self.experts.takes_fp8_rows(problem)

    def __str__(self) -> str:
        beside = "" if self.small is None else f" (small steps: {self.small})"
        return f"{self.all2all.name} + {self.experts.name}{beside}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Every candidate with every reason, and what was chosen of them, if anything."""

    problem: Problem
    device: Device
    asked_for: Mapping[PartKind, str]
    verdicts: Mapping[PartKind, tuple[Verdict, ...]]
    choice: Choice | None

    @property
    def why_not(self) -> str:
        """In one line, for a log: what would run by name, then each reason once, with the parts that it is about."""
        parts_of: dict[str, list[str]] = {}
        for kind, verdicts in self.verdicts.items():
            asked_for = self.asked_for[kind]
            # What could run comes first: what is said of it is what decided.
            for v in sorted(verdicts, key=lambda v: self.mark(v) == "no"):
                if asked_for in (AUTO, v.part.name) and not v.usable(asked_for):
                    for reason in self._reasons(v):
                        parts_of.setdefault(reason, []).append(v.part.name)
        by_name = self.by_name()
        told = [] if by_name is None else [f"by name {by_name} would run"]
        told += [f"{', '.join(dict.fromkeys(parts))}: {reason}" for reason, parts in parts_of.items()]
        return " | ".join(told) or "no all-to-all and experts of the same format fit"

    def by_name(self) -> Choice | None:
        """The best pair that would run if both parts were named, as far as they were not; None: there is none.

        First one that has nothing to install and that CUDA graphs can capture.
        """
        able = {
            kind: [v for v in verdicts if self.asked_for[kind] in (AUTO, v.part.name) and self.mark(v) != "no"]
            for kind, verdicts in self.verdicts.items()
        }
        pairs = [
            Choice(a.part, e.part)
            for a in able[PartKind.PREPARE_FINALIZE]
            for e in able[PartKind.EXPERTS]
            if fits(a.part, e.part) and _small_objection(a.part, e.part, self.verdicts) is None
        ]

        def cost(choice: Choice) -> tuple[int, bool, int]:
            uncaptured = any(part.cannot_be_captured for part in choice.parts)
            return len(choice.to_install), uncaptured, choice.all2all.preference + choice.experts.preference

        return min(pairs, key=cost, default=None)

    def explain(self) -> str:
        """The whole table: the question, then every candidate with each of its reasons on a line of its own."""
        lines = [f"layer   {self.problem.layer}", f"served  {self.problem.serving}", f"device  {self.device}"]
        width = max(len(v.part.label) for verdicts in self.verdicts.values() for v in verdicts)
        for kind, verdicts in self.verdicts.items():
            lines.append(f"{kind.value} (asked for: {self.asked_for[kind]})")
            for v in verdicts:
                told = self._told(v)
                first = f"  {self.mark(v):>7}  {v.part.label:<{width}}  {told[0]}"
                lines += [first.rstrip(), *(f"{'':{13 + width}}{more}" for more in told[1:])]
        if self.choice is None and (pairs := self._pairs_that_do_not_fit()):
            lines += ["pairs", *(f"       no  {pair}" for pair in pairs)]
        return "\n".join(lines)

    def _told(self, verdict: Verdict) -> tuple[str, ...]:
        against = [reason.partition(";")[0] for reason in verdict.reservations]
        if self.mark(verdict) == "chosen" and against:
            return tuple(f"asked for by name although {reason}" for reason in against)
        return self._reasons(verdict) or (verdict.part.summary,)

    def _reasons(self, verdict: Verdict) -> tuple[str, ...]:
        """What speaks against it. Where it cannot run, not why `auto` would leave it out: naming it does not help."""
        return verdict.objections if self.mark(verdict) == "no" else (*verdict.objections, *verdict.reservations)

    def mark(self, verdict: Verdict) -> str:
        """One of: chosen; usable; by name, where only `auto` leaves it out; no."""
        if self.choice is not None and verdict.part in self.choice.parts:
            return "chosen"
        if verdict.objections:
            return "by name" if all(_is_done_away_with(why, verdict.part) for why in verdict.objections) else "no"
        return "usable" if verdict.usable(self.asked_for[verdict.part.kind]) else "by name"

    def _pairs_that_do_not_fit(self) -> list[str]:
        """Why those that could run each by itself cannot run together."""
        all2alls, experts = (
            [v.part for v in self.verdicts[kind] if _asked(v, self.asked_for[kind])] for kind in self.asked_for
        )
        return [
            f"{a.label} + {e.label}: {pair_objection(a, e) or _small_objection(a, e, self.verdicts)}"
            for a in all2alls
            for e in experts
        ]

    def require(self) -> Choice:
        """The choice.

        Raises:
            NoUsablePartError: nothing fits; the message is the whole table.
        """
        if self.choice is None:
            raise NoUsablePartError("no part that was asked for can run this layer:\n" + self.explain())
        return self.choice


def select(
    registry: Registry,
    problem: Problem,
    device: Device,
    *,
    all2all: str = AUTO,
    experts: str = AUTO,
    missing: Mapping[str, Iterable[str]] | None = None,
) -> Selection:
    """Choose the best pair for `problem`.

    Args:
        all2all, experts: a part's name, which is then used or nothing is, or "auto".
        missing: by a part's target, what of it is not installed, and where; default: the modules that this process
            lacks.

    Raises:
        NoUsablePartError: a name that no part has, the message lists the known ones; or that of a third party's part
            which is broken, the message says how.
    """
    asked_for = {PartKind.PREPARE_FINALIZE: all2all, PartKind.EXPERTS: experts}
    verdicts = {}
    for kind, name in asked_for.items():
        require_known(registry, kind, name)
        verdicts[kind] = tuple(_judge(p, problem, device, missing) for p in registry.of(kind))
    pairs = [
        Choice(a.part, e.part, _small_pair(a.part, e.part, verdicts))
        for a in verdicts[PartKind.PREPARE_FINALIZE]
        for e in verdicts[PartKind.EXPERTS]
        if _asked(a, all2all)
        and _asked(e, experts)
        and fits(a.part, e.part)
        and _small_objection(a.part, e.part, verdicts) is None
    ]
    best = min(pairs, key=lambda c: c.all2all.preference + c.experts.preference, default=None)
    return Selection(problem, device, asked_for, verdicts, best)


def require_known(registry: Registry, kind: PartKind, name: str) -> None:
    """Check that `name` is "auto" or that of a part that can be used.

    Raises:
        NoUsablePartError: no part has it, the message lists the known ones; or a third party's part has it and is
            broken, the message says how.
    """
    if broken := registry.broken_named(kind, name):
        raise NoUsablePartError("; ".join(map(str, broken)))
    known = [p.name for p in registry.of(kind)]
    if name not in (AUTO, *known):
        raise NoUsablePartError(f"{kind.value} {name!r} is not known; known: {AUTO}, {', '.join(known)}")


def fits(all2all: Part, experts: Part) -> bool:
    """Whether the two can be composed: same format, and one place for the top-k weight and reduce."""
    return pair_objection(all2all, experts) is None


def pair_objection(all2all: Part, experts: Part) -> str | None:
    """Why the two cannot be composed; None: they can."""
    if all2all.activation_format is not experts.activation_format:
        return (
            f"{all2all.name} delivers {all2all.activation_format.value} rows, "
            f"{experts.name} takes {experts.activation_format.value} ones"
        )
    if not all2all.reduces <= experts.reduces:
        where = " and ".join(sorted(all2all.reduces))
        return f"{all2all.name} leaves the top-k weight and reduce to {where}, {experts.name} does not"
    return None


_Verdicts = Mapping[PartKind, tuple[Verdict, ...]]


def _small_pair(all2all: Part, experts: Part, verdicts: _Verdicts) -> Choice | None:
    """What takes the small steps beside this pair; None: it takes them itself, or nothing does.

    Reservations do not count: who names the all-to-all names both its halves. The experts read the same weights as
    those of the pair, so that they must want them in the same layout.
    """
    small = next((v for v in verdicts[PartKind.PREPARE_FINALIZE] if v.part.name == all2all.small_steps), None)
    if small is None or small.objections:
        return None
    able = [
        v.part
        for v in verdicts[PartKind.EXPERTS]
        if not v.objections and fits(small.part, v.part) and v.part.raw_weights == experts.raw_weights
    ]
    best = min(able, key=lambda part: part.preference, default=None)
    return None if best is None else Choice(small.part, best)


def _small_objection(all2all: Part, experts: Part, verdicts: _Verdicts) -> str | None:
    """Why nothing takes the small steps beside this pair; None: something does, or they are not apart."""
    if not all2all.small_steps or _small_pair(all2all, experts, verdicts) is not None:
        return None
    by_name = {v.part.name: v for v in verdicts[PartKind.PREPARE_FINALIZE]}
    if (small := by_name.get(all2all.small_steps)) is None:
        return f"no all-to-all is called {all2all.small_steps}, which should take the small steps"
    if small.objections:
        return f"{small.part.name}, which should take the small steps, does not run: {'; '.join(small.objections)}"
    layout = "the checkpoint's" if experts.raw_weights else "vLLM's"
    why = [
        f"{v.part.name}: {'; '.join(v.objections) or 'it does not'}"
        for v in verdicts[PartKind.EXPERTS]
        if fits(small.part, v.part)
    ]
    return (
        f"no experts take the {small.part.activation_format.value} rows of {small.part.name} and read the weights in "
        f"{layout} layout, as {experts.name} does ({', '.join(why) or 'none take such rows'})"
    )


def _is_done_away_with(objection: str, part: Part) -> bool:
    """By naming the part: MoE layers then run between CUDA graphs, and vLLM leaves the weights as they are."""
    between = part.cannot_be_captured
    return objection == LAID_OUT or bool(between and objection.startswith(between))


def _asked(verdict: Verdict, name: str) -> bool:
    return name in (AUTO, verdict.part.name) and verdict.usable(name)


def _judge(part: Part, problem: Problem, device: Device, missing: Mapping[str, Iterable[str]] | None) -> Verdict:
    absent = [f"module {m}" for m in part.missing_modules()] if missing is None else missing.get(part.target, ())
    not_there = tuple(f"{what} is not installed; install it" for what in absent)
    return Verdict(part, not_there + part.objections(problem, device), part.reservations(problem, device))

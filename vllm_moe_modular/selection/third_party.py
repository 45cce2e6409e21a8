"""Parts by other people: installed packages that announce an all-to-all or an expert kernel.

A package announces a part with an entry point, whose name is the part's name:

    [project.entry-points."vllm_moe_modular.prepare_finalize"]
    my_transport = "my_package.part:PART"

    [project.entry-points."vllm_moe_modular.experts"]
    my_kernel = "my_package.part:make_part"

It resolves to a `Part`, or to a function without arguments that returns one. The part's `target` names a class,
imported once the part is to run: a `PrepareAndFinalize` (`vllm_moe_modular.modular.prepare_finalize`) or a
`PermuteExpertsUnpermute` (`vllm_moe_modular.modular.experts`) with the constructor

    @classmethod
    def build(cls, context: BuildContext) -> "MyPrepareAndFinalize": ...

where `BuildContext` (`vllm_moe_modular.modular.build`) holds the device, the placement of the experts, the process
group, the sizes and the capacity; take what you use. Layers with the same context share the object. Keep the module of
the entry point free of torch if `vllm-moe-modular explain` is to work where there is none.

`auto` leaves parts of other packages out; who names one gets it.

Entry points are read in every process of the server, so nothing that is wrong with a package may stop it: a broken part
is kept in `Registry.broken` with the reason, and only who asks for it by name gets an error, which holds that reason. A
check that raises counts as an objection that names the package.

`examples/third_party_all_to_all` is a complete package.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from importlib.metadata import EntryPoint, entry_points

from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.checks import replaceable
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import BrokenPart, Check, Part, PartKind, Registry

GROUPS = {
    "vllm_moe_modular.prepare_finalize": PartKind.PREPARE_FINALIZE,
    "vllm_moe_modular.experts": PartKind.EXPERTS,
}
"""The entry-point groups."""


def full_registry(*, import_targets: bool = False) -> Registry:
    """A new registry with the parts of this package and of all installed ones.

    Args:
        import_targets: import third parties' classes too, so that one that cannot be imported is found out here; for a
            process that has torch.
    """
    registry = builtin_registry()
    for group, kind in GROUPS.items():
        add_entry_points(registry, kind, entry_points(group=group), import_targets=import_targets)
    return registry


def add_entry_points(
    registry: Registry, kind: PartKind, found: Iterable[EntryPoint], *, import_targets: bool = False
) -> None:
    """Register what `found` resolves to, or remember in `registry.broken` why that failed. Never raises."""
    for point in sorted(found, key=lambda p: (p.name, p.value)):
        distribution = point.dist.name if point.dist is not None else "an unnamed distribution"
        try:
            part = _guarded(_resolve(point, kind), distribution)
            if import_targets:
                _check_target(part)
            registry.add(part)
        except (Exception, SystemExit) as error:  # whatever other people's code raises
            said = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"{point.value}: {said}; mend or uninstall {distribution}"
            registry.broken.append(BrokenPart(kind=kind, name=point.name, provided_by=distribution, why=why))


def _resolve(point: EntryPoint, kind: PartKind) -> Part:
    found = point.load()
    part = found() if callable(found) else found
    if not isinstance(part, Part):
        raise TypeError(f"it must be a Part, or a function that returns one, and is a {type(part).__name__}")
    if part.kind is not kind:
        raise TypeError(f"the part is of kind {part.kind.value!r}, the entry point's group is for {kind.value!r}")
    if part.name != point.name:
        raise ValueError(f"the part is called {part.name!r}, the entry point {point.name!r}; give both one name")
    if nested := [m for m in part.requires if "." in m]:
        raise ValueError(f"requires takes top-level modules, not {', '.join(nested)}")
    return part


def _check_target(part: Part) -> None:
    if not callable(getattr(part.load(), "build", None)):
        raise TypeError(f"{part.target} has no classmethod build(context)")


def _guarded(part: Part, distribution: str) -> Part:
    """The part with its provenance, what rules out every part, and checks that cannot take down the selection."""
    theirs = [check for check in part.checks if check is not replaceable]
    checks, declines = (tuple(_never_raising(c, distribution) for c in cs) for cs in (theirs, part.declines))
    by_name_only = _comes_with(distribution)
    return replace(part, provided_by=distribution, checks=(replaceable, *checks), declines=(by_name_only, *declines))


def _comes_with(distribution: str) -> Check:
    """That a package is installed does not yet mean that a server shall run on it."""
    return lambda problem, device: f"comes with {distribution}, not with this package; name it to use it"  # noqa: ARG005


def _never_raising(check: Callable[[Problem, Device], str | None], distribution: str) -> Check:
    @wraps(check)
    def guarded(problem: Problem, device: Device) -> str | None:
        try:
            return check(problem, device)
        except Exception as error:
            return f"its check raised {type(error).__name__}: {error}; tell the authors of {distribution}"

    return guarded

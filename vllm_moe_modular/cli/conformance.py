"""`vllm-moe-modular conformance PART`: whether an all-to-all or an expert kernel keeps its contract, on real ranks."""

import argparse
from importlib import import_module

from vllm_moe_modular.errors import MoEModularError, NoUsablePartError
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.selection.third_party import full_registry
from vllm_moe_modular.testing.conformance import Report, Target, check_experts, check_part, check_prepare_finalize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen."""
    parser.add_argument("part", metavar="PART", help='name of a registered part, or "package.module:Class"')
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of an all-to-all (default 2)")
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu (default), or cuda: ranks share GPUs if need be"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a report for each part of that name; 1 if one has a fault."""
    check_device(options.device, options.ranks)
    reports = _reports(options.part, options.ranks, options.device)
    for report in reports:
        for finding in report.findings:
            if finding.traceback:
                print(f"{finding.case}:\n{finding.traceback}")
        print(report)
    return 1 if any(report.findings for report in reports) else 0


def check_device(device: str, ranks: int) -> None:
    """Check that the ranks can be started there.

    Raises:
        MoEModularError: they cannot.
    """
    if device not in ("cpu", "cuda"):
        raise MoEModularError(f"--device {device} is not known; known: cpu, cuda")
    if ranks < 2:
        raise MoEModularError(f"--ranks is {ranks}; an all-to-all is tried on two or more")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MoEModularError("--device is cuda, and torch sees no CUDA GPU")


def _reports(name: str, ranks: int, device: str) -> list[Report]:
    if ":" in name:
        kind = _kind_of(name)
        if kind is PartKind.EXPERTS:
            return [check_experts(Target(name), device=device)]
        return [check_prepare_finalize(Target(name), num_ranks=ranks, device=device)]
    return [check_part(part, num_ranks=ranks, device=device) for part in _parts(name)]


def _parts(name: str) -> list[Part]:
    """An all-to-all and experts may have one name."""
    registry = full_registry(import_targets=True)
    known = [part for kind in PartKind for part in registry.of(kind)]
    found = [part for part in known if part.name == name]
    if broken := [b for kind in PartKind for b in registry.broken_named(kind, name)]:
        raise NoUsablePartError("; ".join(map(str, broken)))
    if not found:
        names = "; ".join(f"{kind.value}: {', '.join(part.name for part in registry.of(kind))}" for kind in PartKind)
        raise NoUsablePartError(f"no part is called {name!r}; known: {names}; or give package.module:Class")
    return found


def _kind_of(target: str) -> PartKind:
    from vllm_moe_modular.modular.experts import PermuteExpertsUnpermute
    from vllm_moe_modular.modular.prepare_finalize import PrepareAndFinalize

    module, _, name = target.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NoUsablePartError(f"{target} cannot be imported: {error}") from error
    for kind, base in ((PartKind.PREPARE_FINALIZE, PrepareAndFinalize), (PartKind.EXPERTS, PermuteExpertsUnpermute)):
        if isinstance(found, type) and issubclass(found, base):
            return kind
    raise NoUsablePartError(f"{target} is neither a PrepareAndFinalize nor a PermuteExpertsUnpermute")

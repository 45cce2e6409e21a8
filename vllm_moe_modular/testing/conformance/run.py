"""Starts ranks and runs the cases on them, one after the other."""

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_moe_modular.errors import MoEModularError, NoUsablePartError
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.testing.conformance.report import Finding, Report
from vllm_moe_modular.testing.ranks import Here, RankFailedError, Ranks, cuda_ranks, shares_devices

if TYPE_CHECKING:
    from vllm_moe_modular.modular.build import BuildContext
    from vllm_moe_modular.testing.conformance.outcome import Outcome

Build = Callable[["BuildContext"], Any]
"""Makes the part; importable by name in another process, as `MyPrepareAndFinalize.build` is."""

DTYPES = ("float32", "bfloat16", "float16")
"""Of activations, as torch calls them; the first one that a part can do is what most cases use."""

CASE_TIMEOUT_S = 30.0
"""After it a case counts as hanging and its ranks are killed. A rank misses its peers after `LOSS_TIMEOUT_S`."""

STEPS_TIMEOUT_S = 120.0
"""The same of the random steps, which a machine that is busy with other things takes long for."""

LOSS_TIMEOUT_S = 8.0

SCHEMES = ("fp8", "fp8 128x128")
"""Quant schemes of weights that are tried: float8_e4m3fn with a scale per output channel, or per block of 128 x 128."""

SHARED_DEVICE_TIMES = 10
"""So much longer both may take where ranks share a GPU: their kernels, which wait for each other, take turns there."""

DEVICES = ("cpu", "cuda")
_MOST_RESTARTS = 2
"""Cases that the ranks did not survive, before the rest is given up: each costs seconds, and they have one cause."""


@dataclass(frozen=True, slots=True)
class Target:
    """A `Build` from a registry's "package.module:Class", whose module is imported on the ranks alone."""

    name: str

    def __call__(self, context: "BuildContext") -> Any:
        module, _, name = self.name.partition(":")
        return getattr(import_module(module), name).build(context)


def check_prepare_finalize(
    build: Build,
    *,
    num_ranks: int = 2,
    device: str = "cpu",
    dtypes: Sequence[str] = DTYPES,
    cases: Collection[str] | None = None,
    ranks: Ranks | None = None,
    loss_timeout_s: float = LOSS_TIMEOUT_S,
) -> Report:
    """Run an all-to-all through every case.

    Args:
        build: makes the part on each rank.
        num_ranks: two or more; with 3, some cases differ on every rank.
        device: "cpu" (gloo) or "cuda": NCCL with one GPU for each rank; with fewer GPUs ranks share them and meet over
            gloo.
        dtypes: that the part can move.
        cases: names; None: all.
        ranks: to run on, started and closed by the caller, `num_ranks` of them; None: new ones.
        loss_timeout_s: how long the group of a part waits for a rank.

    Raises:
        RankFailedError: the ranks could not be started.
    """
    if num_ranks < 2:
        raise MoEModularError(f"an all-to-all is tried on two or more ranks, not on {num_ranks}")
    subject = f"all-to-all {_name(build)} on {num_ranks} ranks ({device})"
    return _check(PartKind.PREPARE_FINALIZE, build, subject, num_ranks, device, dtypes, cases, ranks, loss_timeout_s)


def check_experts(
    build: Build,
    *,
    device: str = "cpu",
    dtypes: Sequence[str] = DTYPES,
    cases: Collection[str] | None = None,
    ranks: Ranks | None = None,
    schemes: Collection[str] = (),
    fp8_rows: Collection[str] = (),
) -> Report:
    """Run an expert kernel through every case, in a process of its own; see `check_prepare_finalize`.

    Args:
        schemes: of quantised weights that it reads; "fp8" (a scale per output channel) and "fp8 128x128" are tried.
        fp8_rows: those of them with which it takes rows in fp8, `Part.fp8_rows`.
    """
    known = case_names(PartKind.EXPERTS, 1, device, schemes=schemes, fp8_rows=fp8_rows)
    subject = f"experts {_name(build)} ({device})"
    return _check(PartKind.EXPERTS, build, subject, 1, device, dtypes, cases, ranks, known=known)


def check_part(part: Part, *, num_ranks: int = 2, device: str = "cpu", ranks: Ranks | None = None) -> Report:
    """Run a registered part through every case, in the dtypes that its own checks allow; see `check_prepare_finalize`.

    Raises:
        NoUsablePartError: its checks rule out this device, or a module that it needs is missing; with the reasons.
    """
    if part.per_layer:
        raise NoUsablePartError(
            f"{part.kind.value} {part.label} cannot be tried on {device}: it needs a server's layer"
        )
    dtypes = [
        dtype for dtype in DTYPES if not all(objections(part, num_ranks, device, dtype, s) for s in ("none", *SCHEMES))
    ]
    if missing := part.missing_modules():
        raise NoUsablePartError(f"{part.kind.value} {part.label} needs {', '.join(missing)}, not installed here")
    if not dtypes:
        why = "; ".join(objections(part, num_ranks, device, DTYPES[0]))
        raise NoUsablePartError(f"{part.kind.value} {part.label} cannot be tried on {device}: {why}")
    build = Target(part.target)
    if part.kind is PartKind.EXPERTS:
        schemes = schemes_of(part, device)
        return check_experts(
            build, device=device, dtypes=dtypes, ranks=ranks, schemes=schemes, fp8_rows=part.fp8_rows
        )  # fmt: skip
    return check_prepare_finalize(build, num_ranks=num_ranks, device=device, dtypes=dtypes, ranks=ranks)


def schemes_of(part: Part, device: str) -> list[str]:
    """The quant schemes of weights that its checks allow, of those that are tried."""
    return [s for s in SCHEMES if any(not objections(part, 1, device, dtype, s) for dtype in DTYPES)]


def objections(part: Part, num_ranks: int, device: str, dtype: str, scheme: str = "none") -> tuple[str, ...]:
    """Of its checks, to every way that tokens may start out; a GPU is taken to be new and to have peer access."""
    hidden, intermediate = (64, 16) if scheme == "none" else (256, 128)
    base = Problem(
        num_experts=8, num_local_experts=4, top_k=2, hidden=hidden, intermediate=intermediate, dtype=dtype,
        quant_scheme=scheme, ep_size=num_ranks, capacity_tokens=64,
    )  # fmt: skip
    own_tokens, same_tokens = replace(base, dp_size=num_ranks), replace(base, tp_size=num_ranks)
    gpu_or_cpu = Device(kind=device, sm=90, peer_access=True)
    said = [part.objections(problem, gpu_or_cpu) for problem in (own_tokens, same_tokens)]
    return min(said, key=len)


def _check(
    kind: PartKind,
    build: Build,
    subject: str,
    num_ranks: int,
    device: str,
    dtypes: Sequence[str],
    cases: Collection[str] | None,
    ranks: Ranks | None,
    loss_timeout_s: float = LOSS_TIMEOUT_S,
    known: Sequence[str] = (),
) -> Report:
    if device not in DEVICES:
        raise MoEModularError(f"device {device!r} is not known; known: {', '.join(DEVICES)}")
    known = known or case_names(kind, num_ranks, device)
    wanted = known if cases is None else list(cases)
    if unknown := [name for name in wanted if name not in known]:
        raise MoEModularError(f"no case is called {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    report = Report(subject)
    restarts = 0
    times = SHARED_DEVICE_TIMES if device == "cuda" and shares_devices(num_ranks) else 1
    with nullcontext(ranks) if ranks is not None else ranks_on(device, num_ranks) as started:
        for number, name in enumerate(wanted):
            _tell(f"case {number + 1} of {len(wanted)}")
            restarts += _run_case(report, started, kind, build, name, dtypes, loss_timeout_s, times)
            if restarts == _MOST_RESTARTS and number + 1 < len(wanted):
                rest = f"{len(wanted) - number - 1} cases, from {wanted[number + 1]!r} on"
                report.findings.append(Finding("not run", f"{rest}: mend what is above first"))
                break
    _tell("")
    if cases is None and not report.passed and not report.findings:
        why = next(iter(report.refused.values()), "there are none")
        report.findings.append(Finding("all cases", f"every single one was refused: {why}"))
    return report


def _tell(progress: str) -> None:
    """On a terminal, in the place of what was told before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)


def ranks_on(device: str, num_ranks: int) -> Ranks:
    """Ranks to try a part on; they start at the first case."""
    return cuda_ranks(num_ranks) if device == "cuda" else Ranks(num_ranks)


def _run_case(
    report: Report,
    ranks: Ranks,
    kind: PartKind,
    build: Build,
    name: str,
    dtypes: Sequence[str],
    loss_timeout_s: float,
    times: int,
) -> bool:
    """Run one case and note what came of it; whether its ranks had to be given up because of a fault."""
    from vllm_moe_modular.testing.conformance.prepare_finalize_cases import KILLED, RANDOM_STEPS_CASE

    timeout_s = STEPS_TIMEOUT_S if name == RANDOM_STEPS_CASE else CASE_TIMEOUT_S
    dying = [1] if name == KILLED else []
    call = kind, build, name, tuple(dtypes), loss_timeout_s * times
    try:
        answers = ranks.run(_on_rank, *call, timeout_s=timeout_s * times, dying=dying)
    except RankFailedError as error:
        what = str(error).splitlines()[0]
        report.findings.append(Finding(name, f"{what}: a rank may not hang, nor take its process down"))
        return True
    outcomes: dict[int, Outcome] = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    broke_off = any(outcome.broke_off for outcome in outcomes.values())
    if broke_off or len({bool(o.refusal) for o in outcomes.values()}) > 1:
        ranks.close()  # they no longer agree on what comes next; the next case starts new ones
    _note(report, name, outcomes)
    return broke_off


def _note(report: Report, name: str, outcomes: "dict[int, Outcome]") -> None:
    bad = {rank: o for rank, o in outcomes.items() if o.problems}
    refusing = [rank for rank, o in outcomes.items() if o.refusal]
    if bad:
        # Who was lost comes second: the cause is with the rank that the others lost.
        first = [rank for rank, o in bad.items() if not o.lost_a_rank] or list(bad)
        report.findings.append(Finding(name, _by_rank({r: bad[r].problems for r in first}), bad[first[0]].traceback))
    elif not refusing:
        report.passed.append(name)
    elif len(refusing) == len(outcomes):
        report.refused[name] = outcomes[refusing[0]].refusal
    else:
        report.findings.append(Finding(name, f"rank {refusing[0]} alone refused: {outcomes[refusing[0]].refusal}"))


def _by_rank(problems: dict[int, tuple[str, ...]]) -> str:
    """Each problem once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, said in problems.items():
        for problem in dict.fromkeys(said):
            ranks.setdefault(problem, []).append(rank)
    clauses = [f"rank {', '.join(map(str, where))}: {problem}" for problem, where in ranks.items()]
    return "; ".join(clauses)


def case_names(
    kind: PartKind, num_ranks: int, device: str, *, schemes: Collection[str] = (), fp8_rows: Collection[str] = ()
) -> list[str]:
    """The cases of a kind of part, in the order in which they are run; for experts see `check_experts`."""
    if kind is PartKind.EXPERTS:
        from vllm_moe_modular.testing.conformance import quantised_cases
        from vllm_moe_modular.testing.conformance.experts_cases import CASES

        return [*CASES, *quantised_cases.case_names(schemes, fp8_rows)]
    from vllm_moe_modular.testing.conformance.prepare_finalize_cases import cases

    return list(cases(num_ranks, device))


def _on_rank(
    here: Here, kind: PartKind, build: Build, name: str, dtypes: tuple[str, ...], loss_timeout_s: float
) -> "Outcome":
    """What a rank runs for a case."""
    from vllm_moe_modular.testing.conformance import experts_cases, prepare_finalize_cases, quantised_cases

    if kind is PartKind.EXPERTS:
        return experts_cases.run(here, build, quantised_cases.ALL[name], dtypes)
    return prepare_finalize_cases.run(here, build, name, dtypes, loss_timeout_s=loss_timeout_s)


def _name(build: Build) -> str:
    if isinstance(build, Target):
        return build.name
    owner = getattr(build, "__self__", None)
    return str(getattr(owner if isinstance(owner, type) else build, "__name__", build))

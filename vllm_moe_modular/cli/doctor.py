"""`vllm-moe-modular doctor`: what is installed here, what works, and what to do about the rest.

Every section is examined whatever came of the others, and code of other people runs in processes of its own.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from vllm_moe_modular.cli import probes
from vllm_moe_modular.errors import IncompatibleVllmError, SettingsError
from vllm_moe_modular.selection.registry import THIS_DISTRIBUTION, PartKind
from vllm_moe_modular.selection.select import AUTO
from vllm_moe_modular.settings import PREFIX, VARIABLES, from_environment
from vllm_moe_modular.version import __version__
from vllm_moe_modular.vllm_adapter.compatibility import ERAS
from vllm_moe_modular.vllm_adapter.contract import drift
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_root, vllm_version

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "vllm_moe_modular.plugin:register"
_ABSENT = "not installed"


@dataclass(slots=True)
class Section:
    """What was found out about one thing.

    Attributes:
        data: for --json.
        lines: for people.
        problems: what is wrong, each with what to do; a missing optional library is none.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; 1 if there is a problem."""
    sections = examine(os.environ)
    problems = [problem for section in sections.values() for problem in section.problems]
    if options.json:
        print(json.dumps({name: s.data for name, s in sections.items()} | {"problems": problems}, indent=2))
        return 1 if problems else 0
    for name, section in sections.items():
        print("\n".join([name, *(f"  {line}" for line in section.lines)]) + "\n")
    print("\n".join(["problems", *(f"  {p}" for p in problems)]) if problems else "no problems")
    return 1 if problems else 0


def examine(environ: Mapping[str, str]) -> dict[str, Section]:
    """Every section by its name; one that cannot be examined is a problem and keeps the others."""
    found: dict[str, Section] = {}
    for name, look in SECTIONS.items():
        try:
            found[name] = look(environ)
        except Exception as error:  # what is broken here is the question
            why = f"{name} could not be examined: {type(error).__name__}: {error}"
            found[name] = Section(data={"error": why}, lines=[why], problems=[why])
    return found


def _versions(environ: Mapping[str, str]) -> Section:  # noqa: ARG001
    releases = {THIS_DISTRIBUTION: __version__, "python": platform.python_version()}
    releases |= {name: _distribution(name) for name in ("vllm", "torch", "triton")}
    section = Section(data=releases, lines=_columns(releases))
    if releases["torch"] == _ABSENT:
        section.problems.append("torch is not installed; install the build that fits this machine")
    return section


def _gpus(environ: Mapping[str, str]) -> Section:  # noqa: ARG001
    answer = probes.ask("torch_and_gpus") if probes.is_there("torch") else probes.Answer()
    if answer.error:
        return Section(
            data={"error": answer.error},
            lines=[f"torch does not import: {answer.error}"],
            problems=[f"torch does not import: {answer.error}; reinstall it"],
        )
    if answer.value is None:
        return Section(data={"gpus": []}, lines=["unknown: torch is not installed"])
    section = Section(data={**answer.value, "links": probes.links()})
    gpus, access = answer.value["gpus"], answer.value["peer_access"]
    section.lines = [
        f"GPU{i}: {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB"
        for i, gpu in enumerate(gpus)
    ] or [f"torch {answer.value['version']} sees none; the layers run on the CPU"]
    if len(gpus) > 1:
        without = [f"{a}-{b}" for a in range(len(gpus)) for b in range(a) if not (access[a][b] and access[b][a])]
        section.lines.append(
            f"peer access: {'not between ' + ', '.join(without) if without else 'between all of them'}"
        )
        rows = [f"{gpu}: {' '.join(joined)}" for gpu, joined in section.data["links"].items()]
        section.lines += ["links, as nvidia-smi names them:", *rows] if rows else ["links: nvidia-smi says nothing"]
    return section


def _libraries(environ: Mapping[str, str]) -> Section:  # noqa: ARG001
    answers = {lib.name: (probes.library(lib), lib.use) for lib in probes.LIBRARIES}
    answers["NVSHMEM"] = (probes.ask("nvshmem"), "deepep_low_latency and pplx between hosts")
    section, told = Section(), {}
    for name, (answer, use) in answers.items():
        section.data[name] = {"use": use, "found": answer.value, "error": answer.error}
        if answer.error:
            told[name] = f"does not load: {answer.error}"
            section.problems.append(f"{name} is installed and does not load ({answer.error}); mend or uninstall it")
        elif answer.value is None:
            told[name] = f"not installed (optional: {use})"
        else:
            told[name] = f"{answer.value['version'] or 'loads'} ({answer.value['file']})"
    section.lines = _columns(told)
    return section


def _adapter(environ: Mapping[str, str]) -> Section:
    section = Section()
    try:
        root = vllm_root()
        release = vllm_version(root)
        era = next((e for e in ERAS if e.covers(release)), None) or find_era(root)
    except IncompatibleVllmError as error:
        return Section(data={"error": str(error)}, lines=[str(error)], problems=[str(error)])
    differences = drift(era.relies_on, root)
    name = ".".join(map(str, release))
    section.data = {"vllm": name, "folder": str(root), "module": era.module, "releases": str(era), "drift": differences}
    section.lines = [f"vLLM {name} in {root}: {era.module}, for {era}"]
    section.lines += [f"drifted: {d}" for d in differences] or ["all interfaces that it relies on are as tested"]
    section.problems = [f"vLLM {name}: {d}; install an unmodified release" for d in differences]
    if why := probes.ask("imported", "vllm").error:
        section.lines.append(f"it does not import: {why}")
        section.problems.append(f"vLLM {name} does not import ({why}); reinstall it beside the torch it was built for")
    if PLUGIN not in {point.value for point in entry_points(group=PLUGIN_GROUP)}:
        section.problems.append(f"vLLM does not find this plugin; pip install {THIS_DISTRIBUTION} beside it")
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "moe_modular" not in allowed.split(","):
        section.problems.append(f"VLLM_PLUGINS={allowed} leaves this plugin out; add moe_modular to it")
    return section


def _variables(environ: Mapping[str, str]) -> Section:
    known = {v.name: v.meaning for v in VARIABLES}
    ours = dict.fromkeys((*known, *sorted(n for n in environ if n.startswith(PREFIX))))
    section, told = Section(), {}
    for name in ours:
        value, meaning = environ.get(name), known.get(name, "not known")
        section.data[name] = {"value": value, "meaning": meaning}
        told[f"{name} {'is not set' if value is None else f'= {value}'}"] = meaning
        try:
            from_environment({name: value} if value is not None else {})
        except SettingsError as error:
            section.problems.append(str(error))
    tuned = environ.get(f"{PREFIX}_TUNED")
    if tuned and not _is_folder(tuned):
        section.problems.append(f"{PREFIX}_TUNED={tuned} is no folder; name the one that the tables are in")
    section.lines = _columns(told)
    return section


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # no name of anything, too long for instance
        return False


def _parts(environ: Mapping[str, str]) -> Section:
    answer = probes.ask("parts")
    if answer.error:
        return Section(
            data={"error": answer.error},
            lines=[f"unknown: {answer.error}"],
            problems=[f"the parts cannot be listed: {answer.error}; uninstall third parties' parts one by one"],
        )
    section, told = Section(data=answer.value), {}
    for part in answer.value["parts"]:
        others = "" if part["provided_by"] == THIS_DISTRIBUTION else f" (from {part['provided_by']})"
        lacking = f"; needs {', '.join(part['missing_modules'])}, not installed" if part["missing_modules"] else ""
        told[f"{part['kind']} {part['name']}{others}"] = part["summary"] + lacking
    section.lines = _columns(told) + [broken["text"] for broken in answer.value["broken"]]
    section.problems = [broken["text"] for broken in answer.value["broken"]]
    for kind, key in ((PartKind.PREPARE_FINALIZE, "ALL2ALL"), (PartKind.EXPERTS, "EXPERTS")):
        wanted = environ.get(f"{PREFIX}_{key}", AUTO)
        names = [AUTO, *(part["name"] for part in answer.value["parts"] if part["kind"] == kind.value)]
        if wanted not in names:
            section.problems.append(f"{PREFIX}_{key}={wanted} names no {kind.value}; known: {', '.join(names)}")
    return section


SECTIONS: Mapping[str, Callable[[Mapping[str, str]], Section]] = {
    "versions": _versions,
    "gpus": _gpus,
    "libraries": _libraries,
    "adapter": _adapter,
    "variables": _variables,
    "parts": _parts,
}


def _distribution(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _ABSENT


def _columns(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in rows.items()]

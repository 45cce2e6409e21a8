"""Questions to this machine, each asked in a process of its own: what crashes or hangs there takes nothing down.

python -m vllm_moe_modular.cli.probes torch_and_gpus
"""

import ctypes
import ctypes.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
"""Importing torch takes seconds on an idle machine, and much longer on one whose disk is cold or whose CPU is busy."""

_ANSWER = "moe-modular-answer:"
"""What a probe prints before its answer, which other output may surround."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a probe.

    Attributes:
        value: what it found out, as JSON values; None where there is nothing, or where it failed.
        error: why it failed, in one line; empty: it did not.
    """

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Library:
    """An optional native library, as a Python module.

    Attributes:
        modules: where it may be; the first that is there counts.
        use: what it is for.
        shared_object: a file beside the module that it should have loaded; its own import may hide that it could not.
    """

    name: str
    modules: tuple[str, ...]
    use: str
    shared_object: str = ""


LIBRARIES = (
    Library("DeepEP", ("deep_ep",), "deepep_high_throughput, deepep_low_latency, deepep_auto"),
    Library("pplx-kernels", ("pplx_kernels",), "pplx", "libpplx_kernels.so"),
    Library("DeepGEMM", ("deep_gemm", "vllm.third_party.deep_gemm"), "fp8 grouped GEMMs"),
)


def ask(probe: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run one of `PROBES` in a process of its own."""
    command = [sys.executable, "-m", "vllm_moe_modular.cli.probes", probe, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {timeout_s:g} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_ANSWER):
            return Answer(json.loads(line.removeprefix(_ANSWER)))
    if done.returncode < 0:
        return Answer(error=f"the process died of {signal.Signals(-done.returncode).name}")
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return Answer(error=said[-1] if said else f"the process ended with status {done.returncode} and said nothing")


def is_there(module: str) -> bool:
    """Whether Python would find the module; nothing is imported."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for name in rest:
        if spec is None or not spec.submodule_search_locations:
            return False
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec is not None


def library(wanted: Library, *, timeout_s: float = TIMEOUT_S) -> Answer:
    """Version and file of a library once it was imported; nothing where it is not installed."""
    module = next((m for m in wanted.modules if is_there(m)), None)
    if module is None:
        return Answer()
    return ask("imported", module, *filter(None, [wanted.shared_object]), timeout_s=timeout_s)


def links() -> Mapping[str, Sequence[str]]:
    """By GPU, how nvidia-smi says that it is joined to each GPU ("NV18", "PIX", "SYS"); empty where it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_links(done.stdout)


def parse_links(topology: str) -> dict[str, list[str]]:
    """The GPU columns of the GPU rows of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines()]
    table = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    # The head of the table begins with GPU0 too, and its other columns are network cards.
    is_head = len(table) > 0 and len(table[0]) > 1 and re.fullmatch(r"GPU\d+|NIC\d+|CPU", table[0][1]) is not None
    body = table[1:] if is_head else table
    return {row[0]: row[1 : 1 + len(body)] for row in body}


def _imported(module: str, shared_object: str = "") -> dict[str, str]:
    found = import_module(module)
    if shared_object:
        ctypes.CDLL(str(Path(str(found.__file__)).with_name(shared_object)))
    return {"version": str(getattr(found, "__version__", "")), "file": str(getattr(found, "__file__", ""))}


def _torch_and_gpus() -> dict[str, Any]:
    import torch

    gpus = range(torch.cuda.device_count())
    of = [torch.cuda.get_device_properties(gpu) for gpu in gpus]
    access = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]
    described = [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}
        for p in of
    ]
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "gpus": described, "peer_access": access}


def _nvshmem() -> dict[str, str] | None:
    """Of the host library: from its own variables, beside the wheels of NVIDIA, or where the loader finds it."""
    roots = [Path(os.environ[name]) for name in ("NVSHMEM_DIR", "NVSHMEM_HOME") if name in os.environ]
    spec = find_spec("nvidia")
    if spec is not None:
        roots += [Path(place, "nvshmem") for place in spec.submodule_search_locations or ()]
    files = [str(file) for root in roots for file in sorted((root / "lib").glob("libnvshmem_host.so*"))]
    name = files[0] if files else ctypes.util.find_library("nvshmem_host")
    if name is None:
        return None
    loaded = ctypes.CDLL(name)
    numbers = [ctypes.c_int() for _ in range(3)]
    if (version_of := getattr(loaded, "nvshmemx_vendor_get_version_info", None)) is not None:
        version_of(*map(ctypes.byref, numbers))
    version = ".".join(str(n.value) for n in numbers)
    return {"version": "" if version == "0.0.0" else version, "file": name}


def _parts() -> dict[str, Any]:
    """Every part that is registered here, and those of third parties that could not be."""
    from vllm_moe_modular.selection.registry import PartKind
    from vllm_moe_modular.selection.third_party import full_registry

    registry = full_registry(import_targets=find_spec("torch") is not None)
    parts = [
        {
            "kind": kind.value,
            "name": part.name,
            "provided_by": part.provided_by,
            "summary": part.summary,
            "missing_modules": list(part.missing_modules()),
        }
        for kind in PartKind
        for part in registry.of(kind)
    ]
    return {"parts": parts, "broken": [{**asdict(b), "kind": b.kind.value, "text": str(b)} for b in registry.broken]}


PROBES: Mapping[str, Callable[..., Any]] = {
    "imported": _imported,
    "nvshmem": _nvshmem,
    "parts": _parts,
    "torch_and_gpus": _torch_and_gpus,
}


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    print(_ANSWER + json.dumps(PROBES[name](*rest)), flush=True)

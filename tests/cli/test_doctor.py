"""`vllm-moe-modular doctor`: it always says something useful, whatever is broken."""

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.cli import doctor, probes
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.settings import VARIABLES
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_root

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
"""
TWO_GPUS = {
    "version": "2.11.0", "cuda": "13.0", "peer_access": [[True, True], [False, True]],
    "gpus": [{"name": "H200", "capability": "9.0", "memory_gib": 139.8}] * 2,
}  # fmt: skip


def answering(answers: Mapping[str, probes.Answer]) -> Any:
    """In the place of `probes.ask`."""
    return lambda probe, *_, **__: answers.get(probe, probes.Answer())


PARTS = probes.Answer(
    {
        "parts": [
            {"kind": "all-to-all", "name": "theirs", "provided_by": "x", "summary": "s", "missing_modules": ["deep_ep"]}
        ],
        "broken": [],
    }
)


def test_on_this_machine(capsys: Captured, monkeypatch: Patch) -> None:
    """One real run: every section is there, and what is optional and absent is no problem."""
    for name in [v.name for v in VARIABLES]:
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [*doctor.SECTIONS, "problems"]
    assert found["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert {part["name"] for part in found["parts"]["parts"]} >= {"local", "torch", "allgather"}
    assert set(found["variables"]) == {v.name for v in VARIABLES}
    assert set(found["libraries"]) == {"DeepEP", "pplx-kernels", "DeepGEMM", "NVSHMEM"}
    assert status == (1 if found["problems"] else 0)
    if find_spec("vllm") is not None:
        assert found["adapter"]["drift"] == []
        assert found["adapter"]["module"] == find_era(vllm_root()).module


def test_text_says_what_is_missing_and_ends_with_the_problems(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "ask", answering({"torch_and_gpus": probes.Answer(TWO_GPUS), "parts": PARTS}))
    monkeypatch.setattr(probes, "is_there", lambda module: module == "torch")
    monkeypatch.setattr(probes, "links", lambda: {"GPU0": ["X", "NV18"], "GPU1": ["NV18", "X"]})
    monkeypatch.setenv("VLLM_MOE_MODULAR_STRICT", "maybe")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "GPU1: H200, compute capability 9.0, 139.8 GiB" in printed
    assert "peer access: not between 1-0" in printed
    assert "GPU0: X NV18" in printed
    assert "DeepEP        not installed (optional: deepep_high_throughput, deepep_low_latency, deepep_auto)" in printed
    assert "all-to-all theirs (from x)  s; needs deep_ep, not installed" in printed
    assert "VLLM_MOE_MODULAR_STRICT='maybe': takes 0 or 1" in printed.split("problems")[-1]


def test_no_vllm_and_no_torch(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "ask", answering({"parts": PARTS}))
    monkeypatch.setattr(probes, "is_there", lambda _: False)
    monkeypatch.setattr(doctor, "version", _no_distribution)
    monkeypatch.setattr("vllm_moe_modular.vllm_adapter.detect.find_spec", lambda _: None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    problems = printed.split("problems\n")[-1]
    assert "torch is not installed; install the build that fits this machine" in problems
    assert "vllm is not installed in this environment; pip install vllm next to this package" in problems
    assert "all-to-all theirs" in printed


def _no_distribution(name: str) -> str:
    raise doctor.PackageNotFoundError(name)


def test_drift_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "_version.py").write_text("__version__ = version = '0.32.0'\n")
    monkeypatch.setattr(doctor, "vllm_root", lambda: tmp_path)
    monkeypatch.setattr(probes, "ask", answering({}))
    section = doctor.examine({"VLLM_PLUGINS": "other"})["adapter"]
    assert section.data["module"] == "era_0_28"
    assert any("MoERunner.routed_experts: gone" in d for d in section.data["drift"])
    assert any("MoERunner.routed_experts: gone; install an unmodified release" in p for p in section.problems)
    assert "VLLM_PLUGINS=other leaves this plugin out; add moe_modular to it" in section.problems


def test_an_untested_release_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "_version.py").write_text("__version__ = version = '0.17.1'\n")
    monkeypatch.setattr(doctor, "vllm_root", lambda: tmp_path)
    monkeypatch.setattr(probes, "ask", answering({}))
    (problem,) = doctor.examine({})["adapter"].problems
    assert "vLLM 0.17.1 is outside the tested releases" in problem


def test_a_vllm_that_does_not_import_is_a_problem(tmp_path: Path, monkeypatch: Patch) -> None:
    why = probes.Answer(error="ImportError: undefined symbol")
    monkeypatch.setattr(probes, "ask", answering({"imported": why}))
    monkeypatch.setattr(doctor, "drift", lambda *_: [])
    monkeypatch.setattr(doctor, "vllm_root", lambda: tmp_path)
    monkeypatch.setattr(doctor, "vllm_version", lambda _: (0, 32, 0))
    assert any("does not import (ImportError: undefined symbol)" in p for p in doctor.examine({})["adapter"].problems)


def test_a_section_that_fails_keeps_the_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "ask", answering({"parts": PARTS}))
    monkeypatch.setattr(doctor, "vllm_root", lambda: 1 / 0)
    found = doctor.examine({})
    assert found["adapter"].problems == ["adapter could not be examined: ZeroDivisionError: division by zero"]
    assert found["parts"].lines


def test_every_misspelt_or_bad_variable_is_a_problem(monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "ask", answering({"parts": PARTS}))
    found = doctor.examine(
        {"VLLM_MOE_MODULAR_ALLTOALL": "x", "VLLM_MOE_MODULAR_TIMEOUT_S": "0", "VLLM_MOE_MODULAR_ALL2ALL": "ring"}
    )
    first, second = sorted(found["variables"].problems)
    assert "VLLM_MOE_MODULAR_ALLTOALL is not known; did you mean VLLM_MOE_MODULAR_ALL2ALL?" in first
    assert "takes a number of seconds from 0.001" in second
    assert found["variables"].data["VLLM_MOE_MODULAR_TIMEOUT_S"]["value"] == "0"
    assert found["parts"].problems == ["VLLM_MOE_MODULAR_ALL2ALL=ring names no all-to-all; known: auto, theirs"]


@pytest.mark.parametrize("name", ["/nowhere", 5000 * "x"], ids=["missing", "too long"])
def test_a_folder_of_tuned_tables_that_is_none_is_a_problem(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "ask", answering({"parts": PARTS}))
    (problem,) = doctor.examine({"VLLM_MOE_MODULAR_TUNED": name})["variables"].problems
    assert "is no folder; name the one" in problem


@pytest.fixture
def module_on_path(tmp_path: Path, monkeypatch: Patch) -> Any:
    """Makes a module that processes of probes find too."""

    def make(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libcuda.so.1: cannot open shared object file')", "ImportError: libcuda.so.1: cannot open"),
        ("import os; os.abort()", "the process died of SIGABRT"),
        ("import os; os._exit(7)", "ended with status 7 and said nothing"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
    ],
)
def test_a_library_that_crashes_or_hangs_takes_nothing_down(source: str, error: str, module_on_path: Any) -> None:
    module_on_path("native_library", source)
    answer = probes.library(probes.Library("x", ("native_library",), ""), timeout_s=2 if "sleep" in source else 60)
    assert answer.value is None
    assert error in answer.error


def test_a_library_that_hides_what_its_loader_said_is_asked_for_its_shared_object(module_on_path: Any) -> None:
    module_on_path("native_library", "")
    answer = probes.library(probes.Library("x", ("native_library",), "", "libnative.so"))
    assert answer.value is None
    assert "libnative.so: cannot open shared object file" in answer.error


def test_the_first_module_that_is_there_counts(module_on_path: Any) -> None:
    module_on_path("native_library", "__version__ = '1.2'\nprint('hello')")
    answer = probes.library(probes.Library("x", ("no_such", "json.no_such", "native_library"), ""))
    assert answer.value["version"] == "1.2"
    assert probes.library(probes.Library("x", ("no_such",), "")) == probes.Answer()


def test_a_library_that_is_there_and_does_not_load_is_a_problem(monkeypatch: Patch) -> None:
    monkeypatch.setattr(probes, "library", lambda _: probes.Answer(error="OSError: libnvshmem_host.so.3"))
    monkeypatch.setattr(probes, "ask", answering({"parts": PARTS}))
    problems = doctor.examine({})["libraries"].problems
    assert len(problems) == len(probes.LIBRARIES)
    assert "DeepEP is installed and does not load (OSError: libnvshmem_host.so.3)" in problems[0]


def test_a_broken_part_of_a_third_party_is_a_problem(monkeypatch: Patch) -> None:
    broken = {"text": "experts 'theirs' of their-package cannot be used: no licence"}
    answer = probes.Answer({**PARTS.value, "broken": [broken]})
    monkeypatch.setattr(probes, "ask", answering({"parts": answer}))
    assert doctor.examine({})["parts"].problems == [broken["text"]]


def test_links_are_those_between_gpus() -> None:
    assert probes.parse_links(TOPOLOGY) == {"GPU0": ["X", "NV18"], "GPU1": ["NV18", "X"]}
    assert probes.parse_links("GPU0\tCPU Affinity\nGPU0\t X \t0-31\n") == {"GPU0": ["X"]}
    assert probes.parse_links("") == {}

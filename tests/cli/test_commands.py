"""Every command of the table has help, and is run once: one that nobody runs may not work for months."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench.test_report import MADE_UP
from tests.trace_files import write
from vllm_moe_modular.cli.main import SUBCOMMANDS, main

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).parents[1] / "selection" / "configs" / "qwen3_30b_a3b.json"


def trace_in(folder: Path) -> Path:
    for rank in (0, 1):
        write(folder, rank)
    return folder


RUNS: dict[str, Callable[[Path], list[str]]] = {
    "checkpoint": lambda folder: ["qwen3_moe", str(folder / "tiny")],
    "explain": lambda folder: [str(CONFIG), "--dp", "2", "--gpu", "cpu"],  # noqa: ARG005
    "conformance": lambda folder: ["vllm_moe_modular.experts.torch_experts:TorchExperts"],  # noqa: ARG005
    "bench": lambda folder: ["experts", "--read", str(MADE_UP)],  # noqa: ARG005
    "tune": lambda folder: ["--model", str(CONFIG), "--rows", "512", "--dry-run"],  # noqa: ARG005
    "trace": lambda folder: [str(trace_in(folder))],
    "doctor": lambda folder: [],  # noqa: ARG005
    "demo": lambda folder: ["--keep", str(folder / "demo")],
}
"""By command, the arguments of its run, given an empty folder."""

MARKS = {
    "checkpoint": [pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers in this environment")],
    "trace": [pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib in this environment")],
    "tune": [pytest.mark.skipif(find_spec("triton") is None, reason="no Triton in this environment")],
    # Its own test serves in every run; here it is the same server again.
    "demo": [pytest.mark.serve, pytest.mark.full],
}
NAMES = [subcommand.name for subcommand in SUBCOMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"vllm-moe-modular {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in NAMES])
def test_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in RUNS, f"{name} is a command that no test runs; add a run of it to RUNS"
    status = main([name, *RUNS[name](tmp_path)])
    printed = capsys.readouterr()
    assert status == 0 or (name == "doctor" and status == 1 and "problems" in printed.out), printed.err
    assert printed.out.strip()
    assert not printed.err


def test_no_command_is_the_help_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert all(f" {subcommand.name} {subcommand.help} " in told for subcommand in SUBCOMMANDS)


def test_no_run_is_of_a_command_that_is_gone() -> None:
    assert set(RUNS) <= set(NAMES)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = (
        f"set -o pipefail; {sys.executable} -m vllm_moe_modular.cli.main explain {CONFIG} --dp 8 --gpu h200 | true"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # an import of them fails
from vllm_moe_modular.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch", ["demo"]),
        ("torch", ["checkpoint", "qwen3_moe", "tiny"]),
        ("torch", ["conformance", "torch"]),
        ("torch", ["bench", "all-to-all"]),
        ("triton", ["tune", "--model", str(CONFIG), "--rows", "512", "--dry-run"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_module_that_is_not_installed_is_one_line_and_status_2(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"vllm-moe-modular {arguments[0]} needs the module {module}, which is not installed here;" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "are in" not in done.stdout  # of the demo, a folder that is kept


@pytest.mark.parametrize("name", ["vllm_moe_modular.nowhere", "vllm_moe_modular"])
def test_a_module_of_ours_that_is_missing_is_a_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("vllm_moe_modular.cli.explain.run", run)
    with pytest.raises(ModuleNotFoundError):
        main(["explain", str(CONFIG), "--gpu", "cpu"])

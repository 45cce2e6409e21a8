"""The numbered scripts run, on a CPU, and stay short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import trace_files
from tests.docs.pages import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("[0-9]_*.py"))


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_is_under_60_lines(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 60


def test_compose_a_kernel() -> None:
    assert "LocalPrepareAndFinalize + TorchExperts: [16, 64]" in run("1_compose_a_kernel.py")


def test_bench_your_shape() -> None:
    shape = ("--experts", "4", "--top-k", "2", "--hidden", "128", "--intermediate", "64")
    printed = run("2_bench_your_shape.py", *shape, "--rows", "1", "16").splitlines()
    assert [line.partition(" rows: ")[0].split(", ")[1] for line in printed] == ["1", "16"]


def test_read_a_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace_files.write(tmp_path, rank)
    printed = run("3_read_a_trace.py", str(tmp_path))
    assert "rank0: 6 sampled calls, 21.0 ms: prepare 29%, experts 57%, finalize 14%, meanwhile 0%" in printed
    assert "model.layers.0.mlp.experts: busiest is rank0 expert 0" in printed


def test_add_a_part() -> None:
    printed = run("4_add_a_part.py")
    assert "chosen  my_experts              an example" in printed
    assert "LocalPrepareAndFinalize + MyExperts: [16, 64]" in printed


def test_no_run_is_missing() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {script.stem[2:] for script in SCRIPTS} <= tests

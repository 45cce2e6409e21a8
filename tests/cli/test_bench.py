"""`bench`: what it refuses, and what it does without a GPU: tell of earlier results and draw them."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.bench.test_all_to_all_report import MADE_UP as MADE_UP_ALL_TO_ALL
from tests.bench.test_report import MADE_UP
from vllm_moe_modular.cli.bench import add_arguments
from vllm_moe_modular.cli.bench_all_to_all import plan_of
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.selection.problem import Device

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
draws = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib in this environment")


@no_gpu
@pytest.mark.parametrize("what", [["experts"], ["experts", "--accuracy"], ["all-to-all"]], ids=" ".join)
def test_needs_a_gpu_and_says_so(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *what]) == 2
    assert "measures a CUDA GPU, and torch sees none here" in capsys.readouterr().err


@pytest.mark.parametrize("what", [[], ["experts"], ["all-to-all"]], ids=str)
def test_every_benchmark_has_help(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *what, "--help"])
    assert exit_.value.code == 0
    assert " ".join(["bench", *what]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--models", "qwen3"], "--models qwen3 is not known; known: qwen3-30b-a3b"),
        (["--models", "gpt-oss-120b", "--fp8"], "gates and ups share blocks"),
        (["--tokens", "0"], "--tokens takes whole numbers"),
        (["--rounds", "0"], "--rounds takes whole numbers"),
        (["--seconds", "-4"], "--seconds -4: takes a number of seconds, more than 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--out", "/nonexistent/x.jsonl"], "--out /nonexistent/x.jsonl cannot be written: No such file"),
        (
            ["--read", str(MADE_UP), "--out", "x", "--tokens", "8", "--fp8"],
            "so --out, --tokens, --fp8 would do nothing",
        ),
        (["--read", "missing.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_bad_options_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "experts", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "1"], "--ranks is 1; an all-to-all is measured on two or more"),
        (["--tokens", "8", "0"], "--tokens takes whole numbers, 1 or more, not 0"),
        (["--hidden", "-1"], "--hidden takes whole numbers"),
        (["--hidden", "2000", "--fp8"], "--hidden 2000 with --fp8: takes multiples of 128"),
        (["--peers", "nvlink", "local"], "--peers local: known: nvlink, deepep_high_throughput"),
        (["--mode", "lazy"], "--mode lazy: known: eager, graphs"),
        (["--out", "/nonexistent/x.jsonl"], "--out /nonexistent/x.jsonl cannot be written: No such file"),
        (
            ["--read", str(MADE_UP_ALL_TO_ALL), "--hidden", "4096", "--shared-gpu"],
            "so --hidden, --shared-gpu would do nothing",
        ),
        (["--read", str(MADE_UP)], "line 1, is no result of bench all-to-all"),
        (["--read", "missing.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_bad_options_of_all_to_all_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all-to-all", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "options", "says"),
    [
        (1, [], "--ranks is 2, and torch sees 1 CUDA GPUs; give each rank one, or pass --shared-gpu"),
        (2, ["--shared-gpu"], "--shared-gpu, and torch sees 2 CUDA GPUs for 2 ranks; leave it out"),
    ],
)
def test_ranks_share_a_gpu_only_where_that_was_asked_for_and_there_are_too_few(
    gpus: int, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert main(["bench", "all-to-all", *options]) == 2
    assert says in capsys.readouterr().err


def test_the_cases_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS", "64")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sizes = ["--hidden", "2048", "4096", "--tokens", "8", "1", "8"]
    options = parser.parse_args(["all-to-all", *sizes, "--fp8", "--mode", "graphs", "--shared-gpu"])
    plan = plan_of(options, Device(kind="cuda"))
    assert [(c.H, c.rows, c.T) for c in plan.cases] == [
        (H, rows, T) for H in (2048, 4096) for rows in ("bfloat16", "fp8") for T in (1, 8)
    ]
    assert {(c.capacity_tokens, c.low_latency_tokens) for c in plan.cases} == {(8, 64)}
    assert (plan.modes, plan.turns, plan.shared_gpu) == (["graphs"], 1, True)
    assert {"nvlink", "torch", "deep_ep.low_latency", "nccl", "link"} < set(plan.peers)


@draws
def test_earlier_all_to_alls_are_told_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plot.svg"
    assert main(["bench", "all-to-all", "--read", str(MADE_UP_ALL_TO_ALL), "--plot", str(picture)]) == 0
    drawn = picture.read_text()
    assert "graphs, 2 ranks" in drawn
    assert "deep_ep.low_latency" in drawn
    assert "pplx" not in drawn, "which was not run"
    out = capsys.readouterr().out
    assert "NvlinkPrepareAndFinalize" in out
    assert str(picture) in out


@draws
def test_a_picture_of_no_all_to_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = tmp_path / "none.jsonl"
    none.write_text("".join(line for line in MADE_UP_ALL_TO_ALL.open() if '"pplx"' in line))
    plot = str(tmp_path / "plot.svg")
    assert main(["bench", "all-to-all", "--read", str(none), "--plot", plot]) == 2
    assert "nothing was timed" in capsys.readouterr().err
    assert main(["bench", "all-to-all", "--read", str(none), "--plot", "plot.bmp"]) == 2
    assert "ends in one of .svg, .png, .pdf" in capsys.readouterr().err


@draws
@pytest.mark.parametrize(
    ("name", "begins"), [("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG"), ("plot.pdf", b"%PDF")], ids=str
)
def test_earlier_results_are_told_and_drawn(
    name: str, begins: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "experts", "--read", str(MADE_UP), "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)
    out = capsys.readouterr().out
    assert "gpt-oss-120b" in out
    assert str(tmp_path / name) in out


@draws
def test_a_picture_of_no_known_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "experts", "--read", str(MADE_UP), "--plot", str(tmp_path / "plot.bmp")]) == 2
    told = capsys.readouterr()
    assert "ends in one of .svg, .png, .pdf" in told.err
    assert not told.out, "before the report"


@draws
def test_a_picture_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = tmp_path / "last.jsonl"
    last.write_text(MADE_UP.read_text().splitlines()[-1] + "\n")
    assert main(["bench", "experts", "--read", str(last), "--plot", str(tmp_path / "plot.svg")]) == 2
    assert "nothing was timed" in capsys.readouterr().err

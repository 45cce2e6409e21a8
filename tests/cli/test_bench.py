"""`bench`: what it refuses, and what it does without a GPU: tell of earlier results and draw them."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.bench.test_report import MADE_UP
from vllm_moe_modular.cli.main import main

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

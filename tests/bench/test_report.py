"""bench.report: what is told of results, out of a made-up file."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.bench.report import BenchFileError, geometric_mean, ours, points, read_results, report

MADE_UP = Path(__file__).with_name("made_up_experts.jsonl")
"""Two models, three numbers of tokens; deep_gemm wins at one point, loses at another, and takes no biases."""


def test_a_report_has_every_part() -> None:
    told = report(read_results([MADE_UP]))
    (line,) = [line for line in told.splitlines() if line.startswith("qwen3-30b-a3b") and " 8192 " in line]
    assert line.split()[2:7] == ["8192", "780.0", "1000.0", "0.78", "0.500"], "ours is deep_gemm there"
    assert "bfloat16, M 8-128: ours / vllm 1.039 in the mean, worst 1.080 (qwen3-30b-a3b, 8)" in told
    assert "bfloat16, M 2048-16384: the better of triton and deep_gemm / vllm 0.500 in the mean" in told
    assert "slower than 1.02: qwen3-30b-a3b bfloat16 M=8 1.080 of vllm" in told
    assert "workspace, MiB, qwen3-30b-a3b bfloat16 M=8192" in told
    assert "ours / vllm 0.75" in told
    assert "workspace larger than vllm's: qwen3-30b-a3b bfloat16 M=8 1.25" in told
    assert "qwen3-30b-a3b bfloat16 M=8192: ours / gemms alone 1.026" in told
    assert "note: vllm, gpt-oss-120b bfloat16, M 8: its default" in told
    assert "M: tokens of a call; roof:" in told
    assert "not run: deep_gemm, gpt-oss-120b bfloat16, M 8: UnsupportedError: a bias" in told


def test_ours_is_what_the_part_runs() -> None:
    by_point = points(read_results([MADE_UP]))
    picked = {key: found["experts"] for key, point in by_point.items() if (found := ours(point))}
    assert picked == {
        ("qwen3-30b-a3b", "bfloat16", 8): "triton",
        ("qwen3-30b-a3b", "bfloat16", 8192): "deep_gemm",
        ("gpt-oss-120b", "bfloat16", 8): "triton",
    }


def test_a_report_of_peers_alone() -> None:
    told = report([r for r in read_results([MADE_UP]) if r["experts"] == "vllm"])
    assert "qwen3-30b-a3b" in told
    assert "in the mean" not in told


def test_of_two_runs_the_last_counts(tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_text(MADE_UP.read_text().splitlines()[0].replace("108.0", "90.0") + "\n")
    by_point = points(read_results([MADE_UP, again]))
    assert by_point["qwen3-30b-a3b", "bfloat16", 8]["triton"]["median_us"] == 90.0


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "there are no results"), ("{", "line 1, is no result"), ('{"experts": "vllm"}\n', "line 1.*model")],
)
def test_what_is_no_file_of_results_is_named(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(BenchFileError, match=says):
        read_results([file])
    with pytest.raises(BenchFileError, match=r"missing.jsonl cannot be read"):
        read_results([tmp_path / "missing.jsonl"])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("eff", None, "KeyError: 'eff'"),
        ("experts", ["triton"], "experts takes text"),
        ("median_us", 0, "median_us takes a number"),
        ("median_us", -1, "median_us takes a number"),
        ("median_us", "x", "median_us takes a number"),
        ("median_us", 10**400, "median_us takes a number"),
        ("model", 5, "model takes text"),
        ("M", True, "M takes a whole number"),
        ("workspace_bytes", "x", "workspace_bytes takes a number"),
    ],
)
def test_an_almost_right_line_is_named(key: str, value: Any, says: str, tmp_path: Path) -> None:
    result = json.loads(MADE_UP.read_text().splitlines()[0])
    result[key] = value
    if value is None:
        del result[key]
    file = tmp_path / "almost.jsonl"
    file.write_text(json.dumps(result))
    with pytest.raises(BenchFileError, match=f"line 1, is no result.*{says}"):
        read_results([file])


def test_what_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 200_000)
    with pytest.raises(BenchFileError, match="line 1, is no result"):
        read_results([file])
    with pytest.raises(BenchFileError, match="cannot be read: embedded null"):
        read_results([Path("a\0b")])


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)

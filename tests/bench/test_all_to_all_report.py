"""bench.all_to_all_report: what is told of results, out of a made-up file."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.bench.all_to_all_report import SHARED, read_results, report
from vllm_moe_modular.bench.report import BenchFileError

MADE_UP = Path(__file__).with_name("made_up_all_to_all.jsonl")
"""Hidden 7168 over two ranks, T 128 and 4096, both modes; no pplx, and torch in no graph."""


def told_of(lines: list[str], title: str) -> list[str]:
    """The lines of one table, single-spaced."""
    start = lines.index(title)
    return [" ".join(line.split()) for line in lines[start + 1 : lines.index("", start)]]


def test_a_table_has_what_ran_what_combine_takes_and_the_share_of_the_link() -> None:
    lines = report(read_results([MADE_UP])).splitlines()
    head, nvlink, eff, *_ = told_of(lines, "hidden 7168, bfloat16 rows, graphs, 2 ranks: round trip, us")
    assert head == "peer class combine takes T 128 T 4096"
    assert nvlink == "nvlink NvlinkPrepareAndFinalize reduced rows 20.0 400.0"
    assert eff == "eff 0.75 0.75"
    peers = [
        line.split()[0] for line in told_of(lines, "hidden 7168, bfloat16 rows, eager, 2 ranks: dispatch alone, us")
    ]
    assert " ".join(peers) == "peer nvlink eff deepep_low_latency eff deep_ep.low_latency eff link torch eff"
    assert not [line for line in lines if "graphs, 2 ranks: dispatch alone" in line]


def test_below_the_tables_come_legend_link_ratios_and_what_was_not_run() -> None:
    told = report(read_results([MADE_UP]))
    assert "combine takes: expert rows, one of each of a token's experts" in told
    assert "link, hidden 7168, bfloat16 rows, graphs, 2 ranks, T 4096: 391 GB/s out of each rank" in told
    said = "deepep_low_latency / deep_ep.low_latency, hidden 7168, bfloat16 rows, graphs, 2 ranks: "
    assert f"{said}1.050 at T 128, 1.000 at T 4096" in told
    assert "above the target: deepep_low_latency, hidden 7168, bfloat16 rows, eager, 2 ranks, T 128: 1.050" in told
    assert "T 4096: 1.000, more" not in told
    assert "not run: pplx: pplx_kernels is not installed\n" in told
    assert (
        "not run: torch: cannot be captured in a CUDA graph (bfloat16 rows, graphs, hidden 7168, T 128, 4096)" in told
    )
    assert SHARED not in told


def test_times_of_ranks_that_shared_a_gpu_come_with_a_warning() -> None:
    results = [{**r, "shared_gpu": True} for r in read_results([MADE_UP])]
    assert report(results).splitlines()[0] == SHARED


def test_a_run_in_which_nothing_could_run_says_why() -> None:
    assert report([r for r in read_results([MADE_UP]) if r["peer"] == "pplx"]) == (
        "not run: pplx: pplx_kernels is not installed"
    )


def test_of_two_runs_the_last_counts(tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_text(MADE_UP.read_text().splitlines()[0].replace("40.0", "33.0") + "\n")
    results = read_results([MADE_UP, again])
    assert len(results) == len(read_results([MADE_UP]))
    assert results[0]["median_us"] == 33.0


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peer", 5, "peer takes text"),
        ("ran", None, "KeyError: 'ran'"),
        ("median_us", None, "KeyError: 'median_us'"),
        ("median_us", 0, "median_us takes a number"),
        ("dispatch_us", "x", "dispatch_us takes a number"),
        ("T", 0, "T takes a whole number"),
        ("H", True, "H takes a whole number"),
        ("not_run", 7, "not_run takes text"),
    ],
)
def test_an_almost_right_line_is_named(key: str, value: Any, says: str, tmp_path: Path) -> None:
    result = json.loads(MADE_UP.read_text().splitlines()[0])
    result[key] = value
    if value is None:
        del result[key]
    file = tmp_path / "almost.jsonl"
    file.write_text(json.dumps(result))
    with pytest.raises(BenchFileError, match=f"line 1, is no result of bench all-to-all.*{says}"):
        read_results([file])

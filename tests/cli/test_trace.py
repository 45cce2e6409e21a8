"""`vllm-moe-modular trace`: the page, and what it says of folders that hold none."""

import re
from pathlib import Path

import pytest

from tests.trace_files import write
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.cli.svg import lines
from vllm_moe_modular.cli.trace_files import read_traces


def test_page_shows_load_imbalance_times_and_rows_and_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write(tmp_path, rank)
    assert main(["trace", str(tmp_path)]) == 0
    assert f"{tmp_path / 'trace.html'}: 12 sampled calls of 2 layers on 2 ranks" in capsys.readouterr().out
    page = (tmp_path / "trace.html").read_text()
    for head in (
        "Load of the experts",
        "Imbalance between ranks",
        "Time of a step",
        "Where the time goes",
        "Rows from",
    ):
        assert head in page
    assert "model.layers.0.mlp.experts, rank 0, its expert 0: 27 rows (2.25)" in page
    assert "fullest rank / mean, step 64: 1.5" in page
    assert not re.search(r"""(src|href)=|@import|url\(|<script""", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_out_names_the_page(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1)
    out = tmp_path / "page.html"
    assert main(["trace", str(tmp_path), "-o", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")


def test_last_line_of_a_killed_server_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, 0)
    whole = len(read_traces(tmp_path)[0].samples)
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_traces(tmp_path)[0].samples) == whole - 1


def test_rank_that_was_killed_at_once_is_said_to_be_missing(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / "rank1.jsonl").write_text('{"kind": "ru')
    assert main(["trace", str(tmp_path)]) == 0
    assert "no trace of rank 1" in (tmp_path / "trace.html").read_text()


def test_names_of_layers_are_text_and_not_markup(tmp_path: Path) -> None:
    file = write(tmp_path, 0)
    file.write_text(file.read_text().replace("model.layers", "<b>.layers"))
    assert main(["trace", str(tmp_path)]) == 0
    assert "<b>" not in (tmp_path / "trace.html").read_text()


def ruin(folder: Path, how: str) -> None:
    file = write(folder, 0, steps=0 if how == "no samples" else 3)
    if how == "empty":
        file.unlink()
    if how == "not a trace":
        file.write_text('{"a": 1}\n')
    if how == "broken in the middle":
        told = file.read_text().splitlines()
        file.write_text("\n".join([*told[:4], told[4][:30], *told[5:], ""]))
    if how == "another format":
        write(folder, 0, format=2)
    if how == "other ranks":
        write(folder, 1, size=4)
    if how == "another day":
        write(folder, 1, started=90000.0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("empty", "holds no traces"),
        ("no samples", "no step was sampled yet, one in 64 is"),
        ("not a trace", "rank0.jsonl, line 1 is not of a trace"),
        ("broken in the middle", "rank0.jsonl, line 5 is not of a trace"),
        ("another format", "rank0.jsonl has format 2, this release reads 1"),
        ("other ranks", "traces of different runs: "),
        ("another day", "rank0.jsonl was begun 1483 minutes before rank1.jsonl"),
    ],
    ids=lambda value: value if " " not in value else value.replace(" ", "-"),
)
def test_bad_folder_is_one_line_and_status_2(
    how: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ruin(tmp_path, how)
    assert main(["trace", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert says in printed


def test_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_line_of_one_point_and_of_equal_values_is_drawn() -> None:
    assert "circle" in lines({"one": [(5, 0.0)]}, x="step")
    assert "polyline" in lines({"flat": [(0, 1.0), (1, 1.0)]}, x="step", least_y=1.0)

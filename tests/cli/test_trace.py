"""`vllm-moe-modular trace`: the page, and what it says of folders that hold none."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trace_files import write
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.cli.trace_files import read_traces

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib in this environment")


def page_of(folder: Path) -> str:
    assert main(["trace", str(folder)]) == 0
    return (folder / "trace.html").read_text()


def test_page_shows_load_imbalance_times_and_rows_and_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write(tmp_path, rank)
    page = page_of(tmp_path)
    assert f"{tmp_path / 'trace.html'}: 12 sampled calls of 2 layers on 2 ranks" in capsys.readouterr().out
    for head in (
        "Load of the experts",
        "Imbalance between ranks",
        "Time of a step",
        "Where the time goes",
        "Rows from",
    ):
        assert f"<h2>{head}" in page
    assert page.count("<svg") == 5
    assert "2.25 times the mean: model.layers.0.mlp.experts, rank 0, its expert 0" in page
    assert "imbalance of ranks, mean</th><td>1.50" in page
    assert all(f">{word}</text>" in page for word in ("prepare", "experts", "finalize", "other", "7 ms", "9 ms"))
    links = re.findall(r"""(?:src|href)=["']?([^"' >]+)|url\(([^)]*)\)""", page)
    assert all(link.startswith(("#", "data:")) for pair in links for link in pair if link)
    assert not re.search("@import|<script|<link|<img", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_no_two_figures_share_a_name_and_the_same_traces_give_the_same_page(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank)
    page = page_of(tmp_path)
    assert page == page_of(tmp_path)
    names = re.findall(r"""\bid=["']([^"']+)""", page)
    assert names
    assert len(names) == len(set(names))


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["matplotlib"] = None  # an import of it fails
from vllm_moe_modular.cli.main import main
sys.exit(main(["trace", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'vllm-moe-modular[trace]'" in done.stderr


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
    page = page_of(tmp_path)
    assert "no trace of rank 1" in page
    assert "Imbalance between ranks" not in page, "it takes all ranks"


def test_names_of_layers_are_text_and_not_markup(tmp_path: Path) -> None:
    file = write(tmp_path, 0)
    file.write_text(file.read_text().replace("model.layers", "<b>.layers"))
    assert "<b>" not in page_of(tmp_path)


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


def test_one_step_is_drawn(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, steps=1)
    assert "<h2>Imbalance between ranks" in page_of(tmp_path)


def test_a_rank_without_a_trace_is_told_by_those_that_received_of_it(tmp_path: Path) -> None:
    write(tmp_path, 0)
    rows = re.findall(r">(\d+)</text>", page_of(tmp_path).rpartition("<h2>Rows from rank to rank")[2])
    assert {"24", "12"} <= set(rows)

"""What the demo concludes from the reports of the ranks; the demo itself is a server test."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_moe_modular.cli.demo import RunFacts, read_run_facts, row_count_objection, table
from vllm_moe_modular.cli.main import main

PROMPTS = [[5, 6, 7]]  # 3 tokens and 24 new ones: 26 forwards of a token, at 2 layers


def facts(folder: Path, *, sent: list[list[int]], received: list[list[int]]) -> RunFacts:
    layers = [{"name": f"layers.{i}", "all2all": "torch", "experts": "torch"} for i in range(2)]
    for rank in (1, 0):
        record = {"rank": rank, "layers": layers, "rows_sent": sent[rank], "rows_received": received[rank], "steps": 48}
        (folder / f"rank{rank}.json").write_text(json.dumps(record))
    log = folder / "server.log"
    log.write_text("(a) INFO moe_modular: 2 MoE layers\nother\n(b) INFO moe_modular: 2 MoE layers\n")
    return read_run_facts(folder, log)


def test_reads_ranks_in_order_and_each_log_line_once(tmp_path: Path) -> None:
    run = facts(tmp_path, sent=[[30, 10], [20, 5]], received=[[30, 20], [10, 5]])
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.log_lines == ("moe_modular: 2 MoE layers",)
    assert row_count_objection(run, PROMPTS) is None
    assert [line.split()[:5] for line in table(run)[3:5]] == [[n, "torch", "+", "torch", "2"] for n in "01"]


def test_report_from_before_the_end_is_not_trusted(tmp_path: Path) -> None:
    run = facts(tmp_path, sent=[[3, 2], [2, 1]], received=[[3, 2], [2, 1]])
    assert row_count_objection(run, PROMPTS) == "8 rows were reported and the run sent at least 52"


def test_rows_that_do_not_arrive_are_named(tmp_path: Path) -> None:
    run = facts(tmp_path, sent=[[30, 10], [20, 5]], received=[[30, 20], [9, 5]])
    assert row_count_objection(run, PROMPTS) == "rank 0 sent 10 rows to rank 1, which received 9"


def test_no_reports_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("")
    assert table(read_run_facts(tmp_path / "none", tmp_path / "server.log")) == []


def test_keep_refuses_a_full_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.serve
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm in this environment")
def test_demo_matches_and_counts_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 prompts and 192 of 192 tokens match" in printed
    assert "do not rely" not in printed

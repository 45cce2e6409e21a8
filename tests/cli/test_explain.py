"""`vllm-moe-modular explain` on public models."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.cli.main import main
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import BrokenPart, PartKind

CONFIGS = Path(__file__).parents[1] / "selection" / "configs"
QWEN = CONFIGS / "qwen3_30b_a3b.json"
Captured = pytest.CaptureFixture[str]


def explain(capsys: Captured, *arguments: object) -> tuple[int, str]:
    status = main(["explain", *map(str, arguments)])
    return status, capsys.readouterr().out


def as_json(capsys: Captured, *arguments: object) -> dict[str, Any]:
    return json.loads(explain(capsys, *arguments, "--json")[1])


def test_says_what_runs_and_each_reason_on_a_line_of_its_own(capsys: Captured) -> None:
    status, printed = explain(capsys, QWEN, "--dp", 2, "--gpu", "cpu")
    assert status == 0
    lines = printed.splitlines()
    assert lines[0] == f"{QWEN}: qwen3_moe, 48 MoE layers, 1 shape"
    assert "48 MoE layers (0-47): run on torch + torch" in lines
    assert "layer   128 experts, 64 on each rank, top 8; hidden 2048, intermediate 768, silu; bfloat16" in printed
    assert any(line.split()[:2] == ["chosen", "torch"] for line in lines)
    assert any(line.split()[:2] == ["no", "nvlink"] and "this device is cpu" in line for line in lines)


def test_a_folder_is_as_good_as_its_config(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text(QWEN.read_text())
    _, printed = explain(capsys, tmp_path, "--dp", 2, "--gpu", "cpu")
    assert "run on torch + torch" in printed


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("gpu", ["h200", "a100", "cpu"])
def test_public_models_get_an_answer_in_which_nothing_is_left_unsaid(config: Path, gpu: str, capsys: Captured) -> None:
    answer = as_json(capsys, config, "--dp", 8, "--gpu", gpu)
    for shape in answer["shapes"]:
        for candidates in shape["candidates"].values():
            for candidate in candidates:
                said = candidate["objections"] or candidate["reservations"]
                assert said or candidate["verdict"] in ("chosen", "usable"), candidate
        found = [c["verdict"] for candidates in shape["candidates"].values() for c in candidates]
        assert found.count("chosen") == (0 if shape["choice"] is None else 2)


def test_all_reasons_of_a_candidate_are_printed_and_nothing_fitting_is_status_1(capsys: Captured) -> None:
    named = ("--experts", "deep_gemm_batched", "--dtype", "float16")
    status, printed = explain(capsys, CONFIGS / "deepseek_v3.json", "--dp", 8, "--gpu", "h200", *named)
    assert status == 1
    assert "58 MoE layers (3-60): start-up stops: nothing runs them on experts deep_gemm_batched\n" in printed
    assert re.search(r"no +deep_gemm_batched +dtype float16 is not one of bfloat16; pass --dtype bfloat16", printed)


def test_what_would_run_if_it_were_named_is_told(capsys: Captured) -> None:
    would = "--all2all nvlink --experts triton would run (the server needs triton)"
    assert (
        f"left to vLLM: nothing fits that auto takes; {would}" in explain(capsys, QWEN, "--dp", 2, "--gpu", "h200")[1]
    )
    named = explain(capsys, QWEN, "--dp", 2, "--gpu", "h200", "--all2all", "nvlink")[1]
    assert f"start-up stops: nothing runs them on all-to-all nvlink with what auto takes; {would}" in named


def test_what_is_told_to_run_by_name_has_nothing_to_install_if_there_is_such(capsys: Captured) -> None:
    for ranks, would in ((16, "allgather --experts triton"), (2, "nvlink --experts triton")):
        assert f"--all2all {would} would run" in explain(capsys, QWEN, "--dp", ranks, "--gpu", "h200")[1]


def test_a_part_that_no_graph_captures_runs_between_graphs_where_it_is_named(capsys: Captured) -> None:
    arguments = ("--dp", 2, "--gpu", "h200", "--experts", "triton")
    status, printed = explain(capsys, QWEN, *arguments, "--all2all", "torch")
    assert status == 0
    assert "between CUDA graphs" in printed
    _, auto = explain(capsys, QWEN, *arguments)
    assert re.search(r"by name +torch +cannot be captured in a CUDA graph", auto)


def test_weights_that_experts_do_not_read_are_named_with_what_they_read(capsys: Captured) -> None:
    status, printed = explain(capsys, CONFIGS / "gpt_oss_120b.json", "--gpu", "h200", "--experts", "torch")
    assert status == 1
    assert re.search(r"no +torch +the weights are quantised \(mxfp4\), it reads fp8, .*; use the vllm experts", printed)


def test_remedies_lead_to_the_experts_that_fit(capsys: Captured) -> None:
    """Of gpt-oss in mxfp4 that is `vllm` alone: whatever else is refused must not be told to be named."""
    _, printed = explain(capsys, CONFIGS / "gpt_oss_120b.json", "--gpu", "h200")
    _, _, experts = printed.partition("experts (asked for: auto)")
    refused, _, by_name = experts.partition("by name  vllm ")
    assert "name it to use it" not in refused
    assert "name it to use it" in by_name
    assert set(re.findall(r"; use (.*)$", refused, re.MULTILINE)) == {"the vllm experts", "triton or vllm experts"}


def test_a_layer_that_auto_leaves_to_vllm_is_status_1(capsys: Captured) -> None:
    status, printed = explain(capsys, QWEN, "--gpu", "cpu")
    assert status == 1
    assert "left to vLLM" in printed
    assert "vLLM's own CPU kernel is faster" in printed


def test_named_parts_are_taken(capsys: Captured) -> None:
    arguments = ("--dp", 2, "--gpu", "h200", "--experts", "torch", "--enforce-eager")
    assert as_json(capsys, QWEN, *arguments)["shapes"][0]["choice"] == {"all2all": "nvlink", "experts": "torch"}
    named = as_json(capsys, QWEN, *arguments, "--all2all", "allgather")["shapes"][0]
    assert named["choice"] == {"all2all": "allgather", "experts": "torch"}
    assert named["asked_for"] == {"all2all": "allgather", "experts": "torch"}


def test_an_all_to_all_of_two_is_told_with_what_takes_the_small_steps(capsys: Captured) -> None:
    arguments = ("--dp", 2, "--gpu", "h200", "--all2all", "deepep_auto", "--experts", "triton")
    small = {"all2all": "deepep_low_latency", "experts": "triton_batched"}
    shape = as_json(capsys, QWEN, *arguments)["shapes"][0]
    assert shape["choice"] == {"all2all": "deepep_auto", "experts": "triton", "small_steps": small}
    _, printed = explain(capsys, QWEN, *arguments)
    pairs = "deepep_auto + triton (small steps: deepep_low_latency + triton_batched)"
    assert f"run on {pairs} (the server needs triton, deep" in printed
    assert len(re.findall("^ +chosen ", printed, re.MULTILINE)) == 4


def test_tensor_parallelism_alone_says_that_an_all_to_all_gains_nothing(capsys: Captured) -> None:
    _, printed = explain(capsys, QWEN, "--tp", 2, "--gpu", "cpu", "--all2all", "allgather")
    assert re.search(
        "chosen +allgather +asked for by name although every rank already has all tokens, sending them gains nothing",
        printed,
    )


@pytest.mark.parametrize(("more", "hosts"), [((), 4), (("--hosts", 2), 2)])
def test_hosts_are_counted_at_eight_gpus_each(more: tuple[object, ...], hosts: int, capsys: Captured) -> None:
    arguments = ("--tp", 4, "--dp", 8, "--gpu", "h100", *more)
    assert as_json(capsys, QWEN, *arguments)["shapes"][0]["problem"]["hosts"] == hosts


def test_options_reach_the_problem(capsys: Captured) -> None:
    arguments = ("--dp", 4, "--no-ep", "--gpu", "h100", "--dtype", "float16", "--max-num-batched-tokens", 512)
    problem = as_json(capsys, QWEN, *arguments)["shapes"][0]["problem"]
    expected = {"ep_size": 1, "dp_size": 4, "intermediate": 192, "dtype": "float16", "capacity_tokens": 512}
    assert expected.items() <= problem.items()
    assert problem["cuda_graph"] is True
    assert "pass --enable-expert-parallel" in explain(capsys, QWEN, *arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere", "--gpu", "cpu"), "nowhere does not exist"),
        ((CONFIGS, "--gpu", "cpu"), "config.json does not exist"),
        ((__file__, "--gpu", "cpu"), "is not JSON"),
        ((QWEN, "--gpu", "v100"), "--gpu v100 is not known; known: h200, h100, a100, b200, cpu"),
        ((QWEN, "--gpu", "cpu", "--dtype", "fp8"), "--dtype fp8 is not known"),
        ((QWEN, "--gpu", "cpu", "--tp", "0"), "--tp is 0; it must be at least 1"),
        ((QWEN, "--gpu", "cpu", "--redundant-experts", "-1"), "--redundant-experts is -1"),
        ((QWEN, "--gpu", "h100", "--dp", "2", "--hosts", "3"), "--hosts is 3, and there are 2 ranks"),
        ((QWEN, "--gpu", "cpu", "--all2all", "ring"), "all-to-all 'ring' is not known; known: auto, local"),
        ((CONFIGS / "deepseek_v3.json", "--gpu", "h100", "--tp", "32", "--no-ep"), "enable expert parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[object, ...], says: str, capsys: Captured) -> None:
    assert main(["explain", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err


def test_a_broken_part_of_a_third_party_is_named_and_stops_nothing(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = builtin_registry()
    broken = BrokenPart(kind=PartKind.EXPERTS, name="theirs", provided_by="their-package", why="no licence")
    registry.broken.append(broken)
    monkeypatch.setattr("vllm_moe_modular.cli.explain.full_registry", lambda: registry)
    status, printed = explain(capsys, QWEN, "--dp", 2, "--gpu", "cpu")
    assert status == 0
    assert printed.endswith("\n\nexperts 'theirs' of their-package cannot be used: no licence\n")
    assert as_json(capsys, QWEN, "--dp", 2, "--gpu", "cpu")["broken_parts"][0]["why"] == "no licence"
    assert main(["explain", str(QWEN), "--dp", "2", "--gpu", "cpu", "--experts", "theirs"]) == 2
    assert "no licence" in capsys.readouterr().err


def test_a_config_that_is_no_object(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert main(["explain", str(tmp_path), "--gpu", "cpu"]) == 2
    assert "holds a JSON list; a config.json holds an object" in capsys.readouterr().err


def test_needs_neither_torch_nor_vllm_nor_transformers() -> None:
    code = f"""
import sys
for name in ("torch", "vllm", "transformers", "triton"):
    sys.modules[name] = None  # an import of it fails
from vllm_moe_modular.cli.main import main
sys.exit(main(["explain", {str(QWEN)!r}, "--dp", "8", "--gpu", "h200", "--all2all", "nvlink", "--experts", "triton"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run on nvlink + triton (the server needs triton)" in done.stdout

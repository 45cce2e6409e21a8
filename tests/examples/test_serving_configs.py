"""The files for `vllm serve --config`: vLLM's own parser takes them, and the parts that they name fit the model."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, all_pages
from vllm_moe_modular.selection.from_config import problems_from_config
from vllm_moe_modular.selection.problem import Device
from vllm_moe_modular.selection.select import select
from vllm_moe_modular.selection.third_party import full_registry
from vllm_moe_modular.settings import Settings, from_environment, with_overrides
from vllm_moe_modular.testing.serving import vllm_version

FOLDER = ROOT / "examples" / "serving"
FILES = sorted(FOLDER.glob("*.yaml"))
CONFIGS = ROOT / "tests" / "selection" / "configs"
H200, CPU = Device(kind="cuda", sm=90, peer_access=True), Device(kind="cpu")
MODELS = {
    "cpu_laptop": ("qwen3_30b_a3b", CPU),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", H200),
    "deepseek_v3": ("deepseek_v3", H200),
    "gpt_oss_120b": ("gpt_oss_120b", H200),
    "two_hosts": ("qwen3_30b_a3b", H200),
    "two_hosts_deepep": ("qwen3_30b_a3b", H200),
    "deepseek_v3_deepep_auto": ("deepseek_v3", H200),
    "prefill": ("deepseek_v3", H200),
    "decode": ("deepseek_v3", H200),
}
"""By file, a configuration of a model of that family, and where it is served."""

HOSTS = {"two_hosts": 2, "two_hosts_deepep": 2}


def test_every_file_is_in_the_table_and_in_the_readme() -> None:
    assert {file.stem for file in FILES} == set(MODELS)
    table = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert {name for line in table for name in re.findall(r"`([^`]*)`", line.split(" | ")[0])} == {
        file.name for file in FILES
    }


@pytest.fixture(scope="module")
def parsed() -> dict[tuple[str, ...], dict[str, Any]]:
    """By arguments of `vllm serve`: of every file, and of every command that the pages show."""
    if vllm_version(sys.executable)[:2] == (0, 11):
        pytest.skip("files and pages are for today's releases")
    arguments = [*(("--config", str(file)) for file in FILES), *serve_commands()]
    command = [sys.executable, "tests/examples/parse_serve.py"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(arguments), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(arguments, json.loads(done.stdout.splitlines()[-1]), strict=True))


def serve_commands() -> list[tuple[str, ...]]:
    """The arguments of `vllm serve` wherever a page has it in a code block; files are those of this repository."""
    found: dict[tuple[str, ...], None] = {}
    for page in all_pages():
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(
            r"^(?!\|)(?: {4}|export |VLLM\w+=|vllm ).*vllm serve (.*)$|^vllm serve (.*)$", text, re.MULTILINE
        ):
            words = shlex.split(line[0] or line[1], comments=True)
            if words and "..." not in words:
                found.setdefault(tuple(str(ROOT / w) if w.endswith(".yaml") else w for w in words))
    return list(found)


def test_the_pages_have_commands() -> None:
    commands = serve_commands()
    assert len(commands) >= 5
    assert any("--headless" in words for words in commands)
    assert any("--additional-config" in words for words in commands)


def test_vllm_parses_the_commands_of_the_pages(parsed: dict[tuple[str, ...], dict[str, Any]]) -> None:
    for words in serve_commands():
        config = parsed[words]["additional_config"] or {}
        with_overrides(Settings(), config.get("moe_modular", {}))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_vllm_parses_it_and_the_parts_fit(file: Path, parsed: dict[tuple[str, ...], dict[str, Any]]) -> None:
    args = parsed["--config", str(file)]
    settings = with_overrides(Settings(), (args["additional_config"] or {}).get("moe_modular", {}))
    name, device = MODELS[file.stem]
    hosts = HOSTS.get(file.stem, 1)
    assert args["data_parallel_size"] // (args["data_parallel_size_local"] or args["data_parallel_size"]) == hosts
    shapes = problems_from_config(
        json.loads((CONFIGS / f"{name}.json").read_text()),
        tp=args["tensor_parallel_size"],
        dp=args["data_parallel_size"],
        pcp=1,
        ep=args["enable_expert_parallel"],
        redundant_experts=0,
        dtype="auto" if args["dtype"] == "auto" else args["dtype"],
    )
    for shape in shapes:
        graphs = device.kind == "cuda" and not args["enforce_eager"]
        problem = replace(shape.problem, cuda_graph=graphs, hosts=hosts)
        chosen = select(
            full_registry(), problem, device, all2all=settings.all2all, experts=settings.experts, missing={}
        )
        chosen.require()


def test_one_server_of_the_split_fills_the_cache_that_the_other_reads(
    parsed: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    prefill, decode = (parsed["--config", str(FOLDER / f"{name}.yaml")] for name in ("prefill", "decode"))
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    assert prefill["kv_connector"] == decode["kv_connector"]
    assert prefill["model"] == decode["model"]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.env")), ids=lambda file: file.stem)
def test_the_variables_beside_a_file_turn_the_plugin_on(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert from_environment(variables).enabled
    assert file.with_suffix(".yaml").is_file()

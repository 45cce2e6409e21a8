"""The pages that say how to add something, followed to the letter: their files are written, their commands are run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, all_pages, blocks
from vllm_moe_modular.cli.main import _parser, main
from vllm_moe_modular.modular.kernel import pair_objections
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.selection.select import select
from vllm_moe_modular.settings import Settings

TWO_RANKS = Problem(num_experts=8, num_local_experts=4, top_k=2, hidden=64, intermediate=32, dp_size=2, ep_size=2)

FOLLOWED_UP_TO = "serve-with-it"  # that takes a model


def write_files(page: Path, folder: Path) -> None:
    """Those that `page` shows with a title."""
    for block in blocks(page):
        if block.title:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)


def follow(page: Path, folder: Path) -> str:
    """What the commands of `page` print."""
    write_files(page, folder / "package")
    site = folder / "site"
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        # `pip install .` leaves this environment as it is, and needs no network.
        **{"PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"},
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    printed = ""
    for block in blocks(page):
        if block.heading == FOLLOWED_UP_TO:
            break
        if block.language == "sh":
            script = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(script, cwd=folder / "package", env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            printed += done.stdout
    return printed


PAGES = {"add_all_to_all.md": "my_transport", "add_experts.md": "my_experts"}
"""With the package that each makes."""


@pytest.mark.full
@pytest.mark.parametrize(("page", "name"), PAGES.items(), ids=PAGES.values())
def test_the_commands_run(page: str, name: str, tmp_path: Path) -> None:
    """From the files to a part that keeps its contract, on real ranks."""
    assert name in follow(DOCS / page, tmp_path)


@pytest.mark.parametrize(("page", "name"), PAGES.items(), ids=PAGES.values())
def test_the_part_that_they_make_fits(page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every run can afford: the files import, and the registry, the selection and the composer take the part."""
    write_files(DOCS / page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    part = import_module(f"{name}.part").PART
    (entry,) = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"].values()
    assert entry == {name: f"{name}.part:PART"}
    registry = builtin_registry()
    registry.add(part)
    asked = {"all2all" if part.kind is PartKind.PREPARE_FINALIZE else "experts": name}
    chosen = select(registry, TWO_RANKS, Device(kind="cpu"), **asked).require()
    assert name in str(chosen)
    assert pair_objections(chosen.all2all.load(), chosen.experts.load()) == []


def test_the_part_that_the_short_page_shows_is_that_of_the_example() -> None:
    page = DOCS / "writing_a_part.md"
    (shown,) = [block.text for block in blocks(page) if "PART = Part(" in block.text]
    (entry,) = [block.text for block in blocks(page) if "entry-points" in block.text]
    folder = ROOT / "examples" / "third_party_all_to_all"
    example = re.sub("  # noqa: .*", "", (folder / "example_broadcast.py").read_text())
    assert shown[shown.index("def has_peers") :] in example
    exec(shown, {})  # with its own imports it is complete
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert tomllib.loads(entry)["project"]["entry-points"] == project["entry-points"]


def own_commands() -> list[str]:
    """The commands of this package in the code blocks of all pages."""
    found: dict[str, None] = {}
    for page in all_pages():
        for line in re.findall(r"^(?: {4})?(vllm-moe-modular .*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(line)
    return list(found)


@pytest.mark.parametrize("command", own_commands())
def test_the_command_line_takes_what_pages_show(command: str) -> None:
    arguments = shlex.split(command)[1:]
    if arguments[0] != "COMMAND":
        _parser(arguments).parse_args(arguments)


def test_the_quickstart_says_rightly_what_auto_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Its two `explain` commands: the first ends with status 1, the second chooses what it names."""
    config = ROOT / "tests" / "selection" / "configs" / "qwen3_30b_a3b.json"
    commands = [
        shlex.split(line)
        for line in own_commands()
        if line.startswith("vllm-moe-modular explain MODEL --dp 2 --gpu h200")
    ]
    auto, named, *_ = sorted(commands[:2], key=len)
    assert main([*auto[1:2], str(config), *auto[3:]]) == 1
    assert "left to vLLM" in capsys.readouterr().out
    assert main([*named[1:2], str(config), *named[3:]]) == 0
    assert "run on nvlink + triton" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("all2all", "ranks", "hosts"), [("nvlink", 2, 1), ("allgather", 16, 2)], ids=["one NVLink host", "several hosts"]
)
def test_the_quickstart_shows_the_line_that_is_logged_on_gpus(
    all2all: str, ranks: int, hosts: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    runtime = pytest.importorskip("vllm_moe_modular.vllm_adapter.runtime")
    qwen3 = Problem(
        num_experts=128, num_local_experts=128 // ranks, top_k=8, hidden=2048, intermediate=768, dp_size=ranks,
        ep_size=ranks, hosts=hosts, cuda_graph=True,
    )  # fmt: skip
    settings = Settings(enabled=True, all2all=all2all, experts="triton")
    made = runtime.Runtime(settings, Device(kind="cuda", sm=90, peer_access=True))
    plan = made.plan("any", qwen3)
    for layer in range(48):
        made.record(f"run on {plan.choice} ({plan.why})", f"model.layers.{layer}.mlp.experts")
    monkeypatch.setattr(runtime.logger, "propagate", True)
    with caplog.at_level("INFO", logger=runtime.logger.name):
        made.summarise()
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged in (DOCS / "quickstart.md").read_text().splitlines()


def test_support_for_a_release(tmp_path: Path) -> None:
    """Its first step; the others change this repository."""
    page = DOCS / "add_vllm_release.md"
    (script,) = [block for block in blocks(page) if block.title]
    (tmp_path / script.title).write_text(script.text)
    done = subprocess.run(
        [sys.executable, script.title],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "IncompatibleVllmError" in done.stderr:
        pytest.skip("no vLLM in this environment")
    assert done.returncode == 0, done.stderr
    assert "no drift" in done.stdout
    assert f"python {script.title}\n" in [block.text for block in blocks(page)]

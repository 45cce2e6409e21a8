import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from vllm_moe_modular.testing.checkpoints import make_checkpoint
from vllm_moe_modular.testing.reference_tokens import default_prompts
from vllm_moe_modular.testing.serving import vllm_version

if vllm_version(sys.executable)[:2] == (0, 11):
    collect_ignore = ["test_cases.py"]  # what it looks for is that of today's releases; the table is run on both

MAX_TOKENS = 24
PROMPTS = default_prompts(8, seed=0)
EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_all_to_all"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny checkpoint of a family, made once per session."""

    @cache
    def make(family: str, **sizes: int) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family) / "model", **sizes)

    return make


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """Greedy tokens of a checkpoint by Hugging Face, made once per session in a process of their own."""

    @cache
    def ask(model: Path) -> list[list[int]]:
        prompts = tmp_path_factory.mktemp("reference") / "prompts.json"
        prompts.write_text(json.dumps(PROMPTS))
        command = [sys.executable, "-m", "vllm_moe_modular.testing.reference_tokens", str(model)]
        command += ["--prompts", str(prompts), "--max-tokens", str(MAX_TOKENS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return ask


@pytest.fixture
def installed_example(tmp_path: Path) -> Path:
    """A folder that the example was installed into."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for file in ("pyproject.toml", "example_broadcast.py"):  # building leaves files beside the source
        (source / file).write_text((EXAMPLE / file).read_text())
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target

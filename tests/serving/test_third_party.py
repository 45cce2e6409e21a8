"""An all-to-all of somebody else, installed with pip as a user would, serves a model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.cells import MODES, SETTINGS_ON
from tests.serving.conftest import MAX_TOKENS, PROMPTS
from vllm_moe_modular.testing.serving import Server

pytestmark = pytest.mark.serve

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_all_to_all"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that the example was installed into."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for file in ("pyproject.toml", "example_broadcast.py"):  # building leaves files beside the source
        (source / file).write_text((EXAMPLE / file).read_text())
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def test_the_example_serves_with_the_tokens_of_hugging_face(
    installed: Path, checkpoint: Callable[..., Path], expected: Callable[..., list[list[int]]]
) -> None:
    model = checkpoint("qwen3_moe")
    truth = expected(model)
    env = {**SETTINGS_ON, "VLLM_MOE_MODULAR_ALL2ALL": "example_broadcast", "PYTHONPATH": str(installed)}
    with Server(model, *MODES["dp2-ep"].args, "--enforce-eager", env=env) as server:
        served = server.complete(PROMPTS, MAX_TOKENS)
        log = server.log()
    assert served == truth
    assert "moe_modular: 2 MoE layers" in log
    assert "run on example_broadcast + torch (all-to-all asked for by name" in log

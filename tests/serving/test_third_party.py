"""An all-to-all of somebody else, installed with pip as a user would, serves a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.cells import MODES, SETTINGS_ON
from tests.serving.conftest import MAX_TOKENS, PROMPTS
from vllm_moe_modular.testing.serving import Server

pytestmark = [pytest.mark.serve, pytest.mark.full]


def test_the_example_serves_with_the_tokens_of_hugging_face(
    installed_example: Path, checkpoint: Callable[..., Path], expected: Callable[..., list[list[int]]]
) -> None:
    model = checkpoint("qwen3_moe")
    truth = expected(model)
    env = {**SETTINGS_ON, "VLLM_MOE_MODULAR_ALL2ALL": "example_broadcast", "PYTHONPATH": str(installed_example)}
    with Server(model, *MODES["dp2-ep"].args, "--enforce-eager", env=env) as server:
        served = server.complete(PROMPTS, MAX_TOKENS)
        log = server.log()
    assert served == truth
    assert "moe_modular: 2 MoE layers" in log
    assert "run on example_broadcast + torch (all-to-all asked for by name" in log

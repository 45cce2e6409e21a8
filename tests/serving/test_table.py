"""Served tokens against Hugging Face, float32, 8 prompts x 24 tokens, for every cell of the table of this vLLM."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.cells import MODES, SETTINGS_ON, TABLES, Cell
from tests.serving.conftest import MAX_TOKENS, PROMPTS
from vllm_moe_modular.testing.serving import Server, vllm_version

pytestmark = pytest.mark.serve

TABLE = TABLES[vllm_version(sys.executable)[:2]]
CELLS = [pytest.param(c, id=str(c)) for c in TABLE.core]
CELLS += [pytest.param(c, id=str(c), marks=pytest.mark.full) for c in TABLE.more]


@pytest.mark.parametrize("cell", CELLS)
def test_tokens_are_those_of_hugging_face(
    cell: Cell, checkpoint: Callable[..., Path], expected: Callable[..., list[list[int]]]
) -> None:
    model, mode = checkpoint(cell.family), MODES[cell.mode]
    truth = expected(model)
    with Server(model, *cell.args, env={**SETTINGS_ON, **mode.env}) as server:
        served = server.complete(PROMPTS, MAX_TOKENS)
        log = server.log()
    assert served == truth
    ran = re.findall(r"moe_modular: \d+ MoE layers? \(.*?\): (?:run on ([\w +]+) \(|left)", log)
    assert set(ran) == {mode.parts}, f"the log says that the layers run on {ran or 'nothing of ours'}"

"""Third parties' parts in a server process."""

import pytest

from vllm_moe_modular.errors import NoUsablePartError
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import BrokenPart, PartKind
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter import runtime
from vllm_moe_modular.vllm_adapter.runtime import Runtime

BROKEN = BrokenPart(kind=PartKind.EXPERTS, name="theirs", provided_by="their-package", why="no licence")
DP2_EP = Problem(num_experts=8, num_local_experts=4, top_k=2, hidden=64, intermediate=32, dp_size=2, ep_size=2)


@pytest.fixture(autouse=True)
def one_broken_part(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = builtin_registry()
    registry.broken.append(BROKEN)
    monkeypatch.setattr(runtime, "full_registry", lambda *, import_targets: registry if import_targets else None)


def server(**asked_for: str) -> Runtime:
    return Runtime(Settings(enabled=True, **asked_for), device=Device(kind="cpu"))


def test_a_broken_part_stops_nothing_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(runtime.logger, "warning", lambda text, *values: told.append(text % values))
    one = server()
    assert str(one.plan("layer", DP2_EP).choice) == "torch + torch"
    one.summarise()
    one.summarise()
    assert told == [f"moe_modular: {BROKEN}"]


def test_who_names_a_broken_part_gets_the_reason() -> None:
    with pytest.raises(NoUsablePartError, match="'theirs' of their-package cannot be used: no licence"):
        server(experts="theirs").plan("layer", DP2_EP)

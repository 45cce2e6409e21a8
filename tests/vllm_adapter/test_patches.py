import sys
from types import ModuleType

import pytest

from vllm_moe_modular.vllm_adapter.patches import Patch, apply_patches


class Worker:
    def load(self, n: int) -> int:
        return n


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("fake_vllm")
    made.Worker = type("Worker", (Worker,), {"load": Worker.load})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_vllm", made)
    return made


def twice(original, worker, n):  # type: ignore[no-untyped-def]
    return 2 * original(worker, n)


def patch(name: str, wrapper=twice, **more: bool) -> Patch:  # type: ignore[no-untyped-def]
    return Patch(
        target=f"fake_vllm:Worker.{name}", wrapper=wrapper, why="test", upstream="none", remove_when="now", **more
    )


def test_the_wrapper_gets_the_original(module: ModuleType) -> None:
    apply_patches([patch("load")])
    assert module.Worker().load(3) == 6


def test_registering_twice_wraps_once(module: ModuleType) -> None:
    apply_patches([patch("load")])
    apply_patches([patch("load")])
    assert module.Worker().load(3) == 6


def test_a_hook_can_be_added(module: ModuleType) -> None:
    apply_patches([patch("init_prepare_finalize", wrapper=lambda original, _worker: original, adds=True)])
    assert module.Worker().init_prepare_finalize() is None


def test_a_target_that_is_gone_is_an_error(module: ModuleType) -> None:  # noqa: ARG001
    with pytest.raises(AttributeError):
        apply_patches([patch("unload")])

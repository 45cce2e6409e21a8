"""Which vLLM is served by which adapter, and what is said of one that is not."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_moe_modular.errors import IncompatibleVllmError
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter import install
from vllm_moe_modular.vllm_adapter.compatibility import ERAS
from vllm_moe_modular.vllm_adapter.contract import drift
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_root, vllm_version


def fake_vllm(root: Path, version: str) -> Path:
    (root / "_version.py").write_text(f"__version__: str\n__version__ = version = '{version}'\n")
    return root


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.32.0", (0, 32, 0)), ("0.11.0.post2", (0, 11, 0)), ("0.28.1+cu130", (0, 28, 1)), ("0.33.0rc1", (0, 33, 0))],
)
def test_release_numbers(tmp_path: Path, version: str, numbers: tuple[int, int, int]) -> None:
    assert vllm_version(fake_vllm(tmp_path, version)) == numbers


@pytest.mark.parametrize(
    ("version", "module"),
    [
        ((0, 10, 2), None),
        ((0, 11, 0), "era_0_11_0"),
        ((0, 11, 1), "era_0_11_1"),
        ((0, 11, 2), "era_0_11_1"),
        ((0, 12, 0), None),
        ((0, 23, 0), None),
        ((0, 26, 0), "era_0_24"),
        ((0, 28, 0), "era_0_28"),
        ((0, 33, 2), "era_0_28"),
        ((0, 34, 0), None),
    ],
)
def test_era_of_a_release(version: tuple[int, int, int], module: str | None) -> None:
    assert [e.module for e in ERAS if e.covers(version)] == ([module] if module else [])


def test_a_release_outside_the_tested_ones_is_named_with_them(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleVllmError, match=r"vLLM 0\.17\.1 is outside .*0\.11\.1 to 0\.11\.2, 0\.24\.0 to"):
        find_era(fake_vllm(tmp_path, "0.17.1"))


def test_drifted_interfaces_are_named(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleVllmError, match=r"MoERunner\.routed_experts: gone"):
        find_era(fake_vllm(tmp_path, "0.32.0"))


def test_no_version_at_all(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleVllmError, match="reinstall vllm"):
        find_era(tmp_path)


def test_an_untested_vllm_is_left_alone_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(install, "vllm_root", lambda: fake_vllm(tmp_path, "0.17.1"))
    install.logger.addHandler(caplog.handler)  # vLLM, once imported, keeps its records from the root logger
    install.install(Settings(enabled=True))
    install.logger.removeHandler(caplog.handler)
    assert "stands aside" in caplog.text
    assert "0.17.1" in caplog.text


def test_an_untested_vllm_stops_a_strict_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "vllm_root", lambda: fake_vllm(tmp_path, "0.17.1"))
    with pytest.raises(IncompatibleVllmError):
        install.install(Settings(enabled=True, strict=True))


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM in this environment")
def test_the_installed_vllm_is_the_one_that_was_tested() -> None:
    era = find_era(vllm_root())
    assert drift(era.relies_on, vllm_root()) == []

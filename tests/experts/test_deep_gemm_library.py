"""experts.deep_gemm_library: each way in which DeepGEMM is not there says what to do."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts import deep_gemm_library as module
from vllm_moe_modular.experts.deep_gemm_library import DeepGemm, expected_rows, load_deep_gemm


@pytest.fixture(autouse=True)
def not_loaded_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DG_JIT_USE_NVRTC", "DG_JIT_NVCC_COMPILER", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    load_deep_gemm.cache_clear()
    yield
    load_deep_gemm.cache_clear()


def test_without_its_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"without nvcc.*bin/nvcc does not exist.*set CUDA_HOME"):
        load_deep_gemm()


def test_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "MODULES", ("no_such_module",))
    with pytest.raises(UnsupportedError, match=r"no_such_module: ModuleNotFoundError.*choose other experts"):
        load_deep_gemm()


def test_the_first_that_can_be_loaded_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    monkeypatch.setattr(module, "MODULES", ("no_such_module", "tests.experts.deep_gemm_stand_in"))
    assert load_deep_gemm().alignment == 128


@pytest.mark.parametrize(("slots", "experts", "rows"), [(1, 128, 1), (128, 128, 1), (129, 128, 2), (65536, 128, 512)])
def test_rows_of_an_expert(slots: int, experts: int, rows: int) -> None:
    assert expected_rows(slots, experts) == rows


@pytest.mark.parametrize("version", ["2.4.2", "1.0", ""])
def test_too_old(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"older than 2\.5"):
        DeepGemm(SimpleNamespace(__version__=version))


@pytest.mark.parametrize("version", ["2.5.0", "2.10.1+local", "3.0"])
def test_new_enough(version: str) -> None:
    DeepGemm(SimpleNamespace(__version__=version))

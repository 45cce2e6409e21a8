"""DeepEP, pplx-kernels and `nvlink` on real GPUs: two ranks on one of each, or on a single one that they share."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from benchmarks.deepep_smoke import CHECKS, LIBRARIES, Check  # noqa: E402
from vllm_moe_modular.testing.ranks import Ranks, cuda_ranks  # noqa: E402

W = 2
TIMEOUT_S = 240.0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with cuda_ranks(W) as started:
        yield started


@pytest.mark.parametrize(
    ("part", "check"),
    [pytest.param(part, check, id=f"{part}, {check.name}") for check in CHECKS for part in check.parts],
)
def test_it_is_exact(part: str, check: Check, ranks: Ranks) -> None:
    if find_spec(LIBRARIES[part]) is None:
        pytest.skip(f"needs {LIBRARIES[part]}")
    check.run_on(ranks, part, timeout_s=TIMEOUT_S)

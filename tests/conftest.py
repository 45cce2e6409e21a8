import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

from vllm_moe_modular.testing.poison import poisoned_empty
from vllm_moe_modular.testing.ranks import Ranks

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton
if find_spec("triton") is None:  # as in the set-up of vLLM 0.11 on a CPU
    collect_ignore_glob = ["kernels/*", "prepare_finalize/test_nvlink*", "prepare_finalize/test_deepep*"]
    collect_ignore_glob += ["prepare_finalize/test_pplx.py"]
    collect_ignore_glob += ["experts/test_triton_*", "experts/test_deep_gemm_experts.py", "bench/test_[aot]*"]
    collect_ignore_glob += ["experts/test_batched_experts_fp8.py", "experts/test_compile_ahead.py"]


@pytest.fixture(autouse=True)
def poison_empty() -> Iterator[None]:
    """torch.empty hands out NaN, so a kernel that leaves a hole fails instead of passing by luck. Ranks do the same."""
    with poisoned_empty():
        yield


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number, started at the first use and kept: starting them takes seconds, a call milliseconds."""
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size))
    for ranks in started.values():
        ranks.close()

"""DeepGEMM, found by name: its grouped GEMMs, over rows that lie expert after expert or in a block for each expert.

Found at run time and not imported above, because vLLM only carries it: nothing of vLLM itself is used, and neither
library is imported before a layer runs on it.

Letters: P rows of the layout, D rows of a block, K contraction, N columns, E experts.
"""

import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vllm_moe_modular.errors import UnsupportedError

MODULES = ("vllm.third_party.deep_gemm", "deep_gemm")
"""The one that vLLM carries, which fits its torch, before one that was installed by itself."""

OLDEST = (2, 5)
"""On Hopper older ones multiply every row of the layout; from here on a GEMM stops at each expert's last block."""

MASKED_ROWS = 128
"""The most rows of a tile of the masked GEMM; tiles of 64 divide it too."""

_INSTEAD = "install the one that vLLM carries or choose other experts"


def expected_rows(slots: int, num_experts: int) -> int:
    """Of an expert, rounded up to a power of two, so that few kernels are ever compiled."""
    return 1 << (-(-slots // max(1, num_experts)) - 1).bit_length()


class DeepGemm:
    """The calls that are used here.

    Args:
        module: DeepGEMM, or what behaves like it.

    Raises:
        UnsupportedError: it is too old.
    """

    def __init__(self, module: Any) -> None:
        version = re.match(r"(\d+)\.(\d+)", str(getattr(module, "__version__", "")))
        if version is None or tuple(map(int, version.groups())) < OLDEST:
            raise UnsupportedError(
                f"DeepGEMM {getattr(module, '__version__', 'without a version')}, older than "
                f"{'.'.join(map(str, OLDEST))}",
                instead=_INSTEAD,
            )
        self._module = module

    @property
    def alignment(self) -> int:
        """The rows of every expert have to begin at a multiple of this."""
        return int(self._module.get_mk_alignment_for_contiguous_layout())

    def grouped_gemm(
        self,
        a_PK: torch.Tensor,
        b_ENK: torch.Tensor,
        *,
        ends: torch.Tensor,
        expected_rows: int,
        out_PN: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """out[p] = b[e] @ a[p] for each p from ends[e - 1], rounded up to `alignment`, to ends[e].

        Of the rows between, those in the last block of an expert are computed too. Which kernel is compiled depends
        on the shape of b, on `expected_rows` and on nothing else.

        Args:
            a_PK: bfloat16, or float8_e4m3fn with scales.
            b_ENK: dtype of a, contiguous.
            ends: [E] int32, on the device.
            expected_rows: of an expert, about.
            out_PN: bfloat16.
            scales: of a, [K / 128, P] contiguous; of b, [E, N / 128 rounded up, K / 128] contiguous; float32.
        """
        if scales is None:
            self._module.m_grouped_bf16_gemm_nt_contiguous(
                a_PK, b_ENK, out_PN, ends, use_psum_layout=True, expected_m_for_psum_layout=expected_rows
            )
        else:
            a_scales_GP, b_scales = scales
            self._module.m_grouped_fp8_gemm_nt_contiguous(
                (a_PK, a_scales_GP.T), (b_ENK, b_scales), out_PN, ends,
                use_psum_layout=True, expected_m_for_psum_layout=expected_rows,
            )  # fmt: skip

    def masked_grouped_gemm(
        self,
        a_EDK: torch.Tensor,
        b_ENK: torch.Tensor,
        *,
        counts: torch.Tensor,
        expected_rows: int,
        out_EDN: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """out[e, d] = b[e] @ a[e, d] for each d below counts[e], and up to the end of the tile that it lies in.

        Tiles have `MASKED_ROWS` rows at most. Which kernel is compiled depends on the shape of b, on `expected_rows`
        and on nothing else.

        Args:
            a_EDK: float8_e4m3fn, contiguous; D a multiple of `MASKED_ROWS`, else a tile reaches into the next block.
            b_ENK: float8_e4m3fn, contiguous.
            counts: [E] int32, on the device.
            expected_rows: of an expert, about.
            out_EDN: bfloat16, contiguous.
            scales: of a, [E, D, K / 128], for which `masked_scales` says how they lie; of b, [E, N / 128 rounded up,
                K / 128] contiguous; float32.
        """
        self._module.m_grouped_fp8_gemm_nt_masked(
            (a_EDK, scales[0]), (b_ENK, scales[1]), out_EDN, counts, expected_rows
        )  # fmt: skip


def masked_scales(memory: torch.Tensor, E: int, D: int, G: int) -> torch.Tensor:
    """[E, D, G] in the first E * G * D elements, those of a group side by side: as the copy engine reads them."""
    return memory[: E * G * D].view(E, G, D).transpose(1, 2)


def compile_up_to(
    compiled: dict[tuple[object, ...], int],
    shape: tuple[object, ...],
    *,
    num_experts: int,
    expected_rows: int,
    device: torch.device,
    run: Callable[[torch.Tensor, int], None],
) -> None:
    """Make DeepGEMM compile what a call with that many rows of an expert, or one with fewer, needs.

    Nothing is done where it was done before, nor while a graph is captured.

    Args:
        compiled: by shape of the weights, up to how many rows; brought up to date.
        run: the GEMMs, given that no expert has rows, [E] of zeros, and how many to expect.
    """
    rows = compiled.get(shape, 0)
    if rows >= expected_rows or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    no_rows = torch.zeros(num_experts, dtype=torch.int32, device=device)
    while rows < expected_rows:
        rows = max(1, 2 * rows)
        run(no_rows, rows)
    compiled[shape] = rows


@cache
def load_deep_gemm() -> DeepGemm:
    """The library.

    Raises:
        UnsupportedError: it is not installed, cannot be loaded, is too old, or lacks the compiler that it needs.
    """
    if why := _compiler_missing():
        raise UnsupportedError(
            f"DeepGEMM without nvcc, with which it compiles its kernels ({why})",
            instead="install the CUDA toolkit and set CUDA_HOME to it, or choose other experts",
        )
    failures = []
    for name in MODULES:
        try:
            return DeepGemm(import_module(name))
        except (ImportError, AssertionError, OSError, RuntimeError) as error:  # its own, and the loader's
            failures.append(" ".join(f"{name}: {type(error).__name__} {error}".split()))
    raise UnsupportedError(f"DeepGEMM that cannot be loaded ({'; '.join(failures)})", instead=_INSTEAD)


def _compiler_missing() -> str:
    """Where nvcc was looked for, as DeepGEMM looks; empty: it is there."""
    if os.environ.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        return ""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return "" if Path(named).is_file() else f"DG_JIT_NVCC_COMPILER names {named}, which does not exist"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return ""
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return "" if nvcc.is_file() else f"{nvcc} does not exist"

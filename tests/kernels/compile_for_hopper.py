"""Compile the specialised GEMMs for Hopper on any machine, and print what became of each as JSON."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from vllm_moe_modular.kernels import specialized_gemm, specialized_gemm_fp8
from vllm_moe_modular.kernels.specialized_warps import registers

H, F = 2048, 768
STAGES = {64: 5, 128: 4, 192: 3}
"""By rows of a block."""

BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Pointer(MockTensor):  # type: ignore[misc]
    """Of aligned memory."""

    def data_ptr(self) -> int:
        return 4096


INT, FLOAT = Pointer(torch.int32), Pointer(torch.float32)


def descriptor(dtype: torch.dtype, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 8 * dtype.itemsize, 2)
    return TensorDescriptor(Pointer(dtype, (4096, H)), [4096, H], [H, 1], [rows, 128 // dtype.itemsize], layout)


def plain(block_rows: int, *, gated: bool, gather: bool, odd: bool = False) -> Any:
    """odd: with all that is optional."""
    return specialized_gemm._specialized_gemm_kernel.warmup(
        Pointer(BFLOAT16), Pointer(BFLOAT16) if gather else descriptor(BFLOAT16, 64), H, descriptor(BFLOAT16, 128),
        Pointer(BFLOAT16) if odd else None, FLOAT if odd else None, INT, INT, INT, 7.0, 1.7, 1.0, H, F,
        K=8, GATED=gated, ACTIVATION="swiglu_oai" if odd else "silu", HAS_LIMIT=odd, GATHER=gather,
        BLOCK_R=block_rows, STAGES=STAGES[block_rows], GROUP_R=8, PDL=True, num_warps=4, grid=(132,), launch_pdl=True,
        **registers(block_rows),
    )  # fmt: skip


def fp8(block_rows: int, *, gated: bool, gather: bool, odd: bool = False) -> Any:
    """odd: with all that is optional, and scales of channels."""
    return specialized_gemm_fp8._specialized_gemm_fp8_kernel.warmup(
        Pointer(FP8 if gated else BFLOAT16), FLOAT if gated else None,
        Pointer(FP8) if gather else descriptor(FP8, 64), FLOAT, descriptor(FP8, 128), FLOAT,
        Pointer(BFLOAT16) if odd else None, FLOAT if odd and gated else None, INT, INT, INT, 0.0, 1.7, 1.0,
        0, H // 128, 1, H, F,
        K=8, GATED=gated, ACTIVATION="silu", HAS_LIMIT=False, BLOCK_SCALED=not odd, GATHER=gather, BLOCK_R=block_rows,
        STAGES=STAGES[block_rows], GROUP_R=8, PDL=True, num_warps=4, grid=(132,), launch_pdl=True,
        **registers(block_rows),
    )  # fmt: skip


def report(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        sass = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "matrix_instructions": len(re.findall(r"GMMA\.", sass)),
        "spilled": len(re.findall(r"\bSTL\b", sass)),
        "shared_bytes": kernel.metadata.shared,
    }


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _=0: 0,
        )
    )
    made = {
        "gated": plain(128, gated=True, gather=True),
        "gated, blocks of 64 rows": plain(64, gated=True, gather=True),
        "gated, all options": plain(128, gated=True, gather=True, odd=True),
        "gated, blocks of 192 rows": plain(192, gated=True, gather=False),
        "down, blocks of 192 rows": plain(192, gated=False, gather=False),
        "gated, blocks of 192 rows, all options": plain(192, gated=True, gather=False, odd=True),
        "down": plain(128, gated=False, gather=False),
        "fp8 gated": fp8(128, gated=True, gather=True),
        "fp8 gated, blocks of 64 rows": fp8(64, gated=True, gather=True),
        "fp8 gated, all options": fp8(128, gated=True, gather=True, odd=True),
        "fp8 down": fp8(128, gated=False, gather=False),
    }
    print(json.dumps({name: report(kernel) for name, kernel in made.items()}))


if __name__ == "__main__":
    main()

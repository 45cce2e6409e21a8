"""What the kernel tests share: the device, poisoned outputs, random problems."""

import math
import mmap

import torch
import triton.language as tl

from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows
from vllm_moe_modular.modular.fp8 import dequantized
from vllm_moe_modular.testing.fp8_weights import fp8_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # cpu: Triton's interpreter

# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory at its worst."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)
    fill = float("nan") if dtype.is_floating_point else -(2**30)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def zeros_on_demand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on a CPU they take memory only where they are written."""
    if DEVICE.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def random_ids(R: int, K: int, E: int, *, seed: int = 0) -> torch.Tensor:
    """[R, K] int32, distinct within a row."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(R, E, generator=g).topk(K).indices.int().to(DEVICE)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Drawn on the CPU, so that every device tests the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_fp8_weights(E: int, N: int, D: int, *, blocks: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, D] and scales, which differ so much that one in the wrong place shows."""
    w = randn(E, N, D, dtype=torch.float32, seed=seed)
    sizes = 2 ** randn(E, -(-N // 128), -(-D // 128), dtype=torch.float32, seed=seed + 100)
    w *= sizes.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)[:, :N, :D]
    w *= 2 ** randn(E, N, 1, dtype=torch.float32, seed=seed + 200)
    values, scales = zip(*(fp8_weights(w_ND / D**0.5, blocks=blocks) for w_ND in w), strict=True)
    # Torch on a CPU cannot stack fp8.
    return torch.stack([v.view(torch.uint8) for v in values]).view(torch.float8_e4m3fn), torch.stack(scales)


def stand_for(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, D] in `dtype`."""
    return torch.stack([dequantized(w_ND, its_scale, dtype) for w_ND, its_scale in zip(w, scale, strict=True)])


def poisoned_fp8_rows(rows: int, columns: int) -> Fp8Rows:
    """NaN in the values and in the scales."""
    return Fp8Rows(
        poisoned(rows, columns, dtype=torch.float8_e4m3fn), poisoned(rows, -(-columns // 128), dtype=torch.float32)
    )


def _mend_fp8_casts() -> None:
    """Cast float32 to fp8 with torch where the interpreter runs.

    Triton 3.6's own cast ors a mantissa that was rounded up to a power of two into the exponent: 1.97 becomes 1. This
    can go when `triton.runtime.interpreter._convert_float` adds it.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(builder, src, dst_type, rounding_mode):  # type: ignore[no-untyped-def]
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.float8e4nv:
            values = torch.tensor(src.data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            return TensorHandle(values, dst_type.scalar)
        return cast(builder, src, dst_type, rounding_mode)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


if DEVICE.type == "cpu":
    _mend_fp8_casts()

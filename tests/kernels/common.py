"""What the kernel tests share: the device, poisoned outputs, random problems."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # cpu: Triton's interpreter

# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory at its worst."""
    fill = float("nan") if dtype.is_floating_point else -(2**30)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def random_ids(R: int, K: int, E: int, *, seed: int = 0) -> torch.Tensor:
    """[R, K] int32, distinct within a row."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(R, E, generator=g).topk(K).indices.int().to(DEVICE)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Drawn on the CPU, so that every device tests the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)

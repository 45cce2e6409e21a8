"""The meaning of `kernels.quantize_fp8`, and its inverse."""

import torch
from torch.nn.functional import pad


def quantize_fp8(x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, H] float8_e4m3fn and [R, H/128 rounded up] float32."""
    R, H = x_RH.shape
    groups = pad(x_RH.float(), (0, -H % 128)).view(R, -(-H // 128), 128)
    largest = groups.abs().amax(dim=2).clamp(min=2.0**-100)
    # By a tensor: a number on either side torch takes for a product with a rounded reciprocal.
    most = torch.full_like(largest, 448)
    values = (groups * most.div(largest)[:, :, None]).flatten(1)[:, :H].contiguous()
    return values.to(torch.float8_e4m3fn), largest.div(most)


def dequantize_fp8(values_RH: torch.Tensor, scales_RG: torch.Tensor) -> torch.Tensor:
    """[R, H] float64."""
    return values_RH.double() * scales_RG.double().repeat_interleave(128, dim=1)[:, : values_RH.shape[1]]

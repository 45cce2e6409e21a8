"""The meaning of `kernels.quantize_groups`, in float32 as it is."""

import torch


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., F] to [..., F] float8_e4m3fn, and the scales [..., F / 128] float32."""
    groups = x.float().view(*x.shape[:-1], -1, 128)
    largest = groups.abs().amax(-1).clamp(min=1e-10)
    most = torch.full_like(largest, 448)  # a number on either side torch takes for a product with a reciprocal
    return (groups * (most / largest)[..., None]).view(x.shape).to(torch.float8_e4m3fn), largest / most


def dequantize_groups(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What `quantize_groups` stands for, in the dtype of `scale`."""
    groups = q.to(scale.dtype).view(*q.shape[:-1], -1, 128)
    return (groups * scale[..., None]).view(q.shape)

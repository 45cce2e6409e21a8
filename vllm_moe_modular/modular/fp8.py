"""Weights in float8_e4m3fn with their scales, as `ExpertWeights` holds them: what they stand for, whether they fit.

Letters: N output channels, D summed dimension.
"""

import torch

from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.modular.experts import ExpertWeights

BLOCK = 128
"""Rows and columns of a block with a scale of its own: the scale block of the checkpoint format."""


def dequantized(w_ND: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights of one expert.

    Args:
        w_ND: [N, D].
        scale: [N], or [N/128, D/128] rounded up.
        dtype: of the result; multiplied in float32 (float64 for float64) and rounded once.
    """
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    scale = scale.to(accumulate)
    if scale.dim() == 1:
        scale_ND = scale[:, None]
    else:
        N, D = w_ND.shape
        scale_ND = scale.repeat_interleave(BLOCK, dim=0)[:N].repeat_interleave(BLOCK, dim=1)[:, :D]
    return (w_ND.to(accumulate) * scale_ND).to(dtype)


def require_scales(weights: ExpertWeights, where: str) -> None:
    """Check that weights in fp8 have the scales that the contract gives them, and that others have none.

    Args:
        where: who is asking, for the message: "the triton experts".

    Raises:
        UnsupportedError: a scale is missing, out of place, or not float32 and contiguous; the two tensors are scaled in
            different ways.
        ShapeError: a scale has another shape.
    """
    scales = {"w13": (weights.w13, weights.w13_scale), "w2": (weights.w2, weights.w2_scale)}
    for name, (w, scale) in scales.items():
        if (w.dtype == torch.float8_e4m3fn) != (scale is not None):
            raise UnsupportedError(
                f"{name} in {w.dtype} {'without' if scale is None else 'with'} {name}_scale in {where}",
                instead="give float8_e4m3fn weights their scales, and no others",
            )
        if scale is None:
            continue
        if scale.dtype != torch.float32 or not scale.is_contiguous():
            raise UnsupportedError(
                f"{name}_scale in {scale.dtype} with strides {scale.stride()} in {where}",
                instead="pass it as contiguous float32",
            )
        E, N, D = w.shape
        want = {"E": E, "N": N}
        if scale.dim() == 3:
            want = {"E": E, "N/128": -(-N // BLOCK), "D/128": -(-D // BLOCK)}
        if scale.shape != tuple(want.values()):
            raise ShapeError(f"{name}_scale", want=tuple(want), values=want, got=scale.shape)
    w13, w2 = ("unscaled" if s is None else _SCHEMES[s.dim()] for s in (weights.w13_scale, weights.w2_scale))
    if w13 != w2:
        raise UnsupportedError(f"w13 {w13} with w2 {w2} in {where}", instead="scale both alike")


_SCHEMES = {2: "scaled per output channel", 3: "scaled per 128 x 128 block"}

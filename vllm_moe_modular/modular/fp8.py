"""Weights and rows in float8_e4m3fn with their scales: what they stand for, whether they fit.

Letters: N output channels, D summed dimension, H hidden.
"""

import torch

from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import Rows

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


def dequantized_rows(rows: Rows) -> torch.Tensor:
    """The rows in the dtype of the activations: as they are, or multiplied in float32 and rounded once."""
    if rows.x_scale is None:
        return rows.x
    accumulate = torch.float64 if rows.dtype == torch.float64 else torch.float32
    groups = rows.x.to(accumulate).view(*rows.x_scale.shape, BLOCK)
    return (groups * rows.x_scale.to(accumulate).unsqueeze(-1)).view(rows.x.shape).to(rows.dtype)


def require_row_scales(rows: Rows, where: str) -> None:
    """Check that rows in fp8 have the scales that the contract gives them, and that others have none.

    Args:
        where: who is asking, for the message: "the triton experts".

    Raises:
        UnsupportedError: a scale is missing, out of place, or not float32; values that are not contiguous; nobody said
            what dtype the experts return.
        ShapeError: the scales are not one for each row and 128 columns.
    """
    if (rows.x.dtype == torch.float8_e4m3fn) != (rows.x_scale is not None):
        raise UnsupportedError(
            f"rows in {rows.x.dtype} {'without' if rows.x_scale is None else 'with'} x_scale in {where}",
            instead="give float8_e4m3fn rows their scales, and no others",
        )
    if rows.x_scale is None:
        return
    if rows.x_scale.dtype != torch.float32 or not rows.x.is_contiguous() or rows.out_dtype is None:
        raise UnsupportedError(
            f"rows with strides {rows.x.stride()}, x_scale in {rows.x_scale.dtype} and out_dtype {rows.out_dtype} "
            f"in {where}",
            instead="pass contiguous rows, float32 scales, and as out_dtype the dtype of the layer's activations",
        )
    *leading, H = rows.x.shape
    if rows.x_scale.shape != (*leading, H // BLOCK) or H % BLOCK:
        names = ("R",) if len(leading) == 1 else ("E", "C")
        values = {**dict(zip(names, leading, strict=True)), f"{H}/128": H // BLOCK}
        raise ShapeError("x_scale", want=tuple(values), values=values, got=rows.x_scale.shape)


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

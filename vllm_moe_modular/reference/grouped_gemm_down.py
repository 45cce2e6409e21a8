"""The meaning of `kernels.grouped_gemm_down`, block by block, in the dtype of `x_SF`."""

from collections.abc import Iterable

import torch


def grouped_gemm_down(
    x_SF: torch.Tensor,
    w2: torch.Tensor,
    sorted_slots: torch.Tensor,
    blocks: Iterable[tuple[int, int, int]],
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, H]; zero where a slot is in no block."""
    out_SH = x_SF.new_zeros(x_SF.shape[0], w2.shape[1])
    for expert, start, rows in blocks:
        y = x_SF[start : start + rows] @ w2[expert].T
        out_SH[sorted_slots[start : start + rows].long()] = y if bias is None else y + bias[expert]
    return out_SH

"""The meaning of `kernels.gather_rows`."""

from collections.abc import Iterable

import torch


def gather_rows(
    x_RH: torch.Tensor, sorted_slots: torch.Tensor, blocks: Iterable[tuple[int, int, int]], *, top_k: int
) -> torch.Tensor:
    """[S, H]; zero where a position is in no block."""
    out_SH = x_RH.new_zeros(sorted_slots.numel(), x_RH.shape[1])
    for _, start, rows in blocks:
        out_SH[start : start + rows] = x_RH[sorted_slots[start : start + rows].long() // top_k]
    return out_SH

"""The meaning of `kernels.scatter_rows`."""

import torch


def scatter_rows(x_RH: torch.Tensor, positions: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[P, H] with P = `num_rows`; zero where no slot has its row."""
    K = positions.numel() // x_RH.shape[0]
    out_PH = x_RH.new_zeros(num_rows, x_RH.shape[1])
    for slot, position in enumerate(positions.tolist()):
        if position >= 0:
            out_PH[position] = x_RH[slot // K]
    return out_PH

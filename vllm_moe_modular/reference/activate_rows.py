"""The meaning of `kernels.activate_rows`, in the dtype of `gate_up_PN`."""

from collections.abc import Callable

import torch


def activate_rows(
    gate_up_PN: torch.Tensor,
    positions: torch.Tensor,
    *,
    activation: Callable[[torch.Tensor], torch.Tensor],
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[P, F]; zero where no slot has its row."""
    out_PF = gate_up_PN.new_zeros(gate_up_PN.shape[0], gate_up_PN.shape[1] // 2)
    for slot, position in enumerate(positions.tolist()):
        if position >= 0:
            weight = 1 if topk_weights is None else topk_weights.flatten()[slot].to(gate_up_PN.dtype)
            out_PF[position] = activation(weight * gate_up_PN[position])
    return out_PF

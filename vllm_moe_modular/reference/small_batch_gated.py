"""The meaning of `kernels.small_batch_gated`, slot by slot, in the dtype of `x_RH`."""

from collections.abc import Callable

import torch


def small_batch_gated(
    x_RH: torch.Tensor,
    w13: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    *,
    activation: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None = None,
    topk_weights_RK: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, F]; zero where a slot has no expert here."""
    E, two_f, _ = w13.shape
    out_SF = x_RH.new_zeros(topk_ids_RK.numel(), two_f // 2)
    for slot, expert in enumerate(topk_ids_RK.flatten().tolist()):
        if not 0 <= expert < E:
            continue
        x = x_RH[slot // topk_ids_RK.shape[1]]
        if topk_weights_RK is not None:
            x = x * topk_weights_RK.flatten()[slot].to(x.dtype)
        gate_up = w13[expert] @ x
        out_SF[slot] = activation(gate_up if bias is None else gate_up + bias[expert])
    return out_SF

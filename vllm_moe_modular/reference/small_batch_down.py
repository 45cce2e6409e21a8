"""The meaning of `kernels.small_batch_down`, slot by slot, in the dtype of `x_SF`."""

import torch


def small_batch_down(
    x_SF: torch.Tensor,
    w2: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, H]."""
    E, H, _ = w2.shape
    R, K = topk_ids_RK.shape
    out_RH = x_SF.new_zeros(R, H)
    for slot, expert in enumerate(topk_ids_RK.flatten().tolist()):
        if not 0 <= expert < E:
            continue
        y = w2[expert] @ x_SF[slot]
        if bias is not None:
            y = y + bias[expert]
        out_RH[slot // K] += y if topk_weights_RK is None else topk_weights_RK.flatten()[slot].to(y.dtype) * y
    return out_RH

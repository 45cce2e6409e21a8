"""The meaning of `kernels.weighted_topk_sum`, in the dtype of `y_SH`."""

import torch


def weighted_topk_sum(
    y_SH: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    topk_weights_RK: torch.Tensor | None,
    *,
    num_experts: int,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, H]."""
    R, K = topk_ids_RK.shape
    out_RH = y_SH.new_zeros(R, y_SH.shape[1])
    for r in range(R):
        for k in range(K):
            if 0 <= topk_ids_RK[r, k] < num_experts:
                weight = 1 if topk_weights_RK is None else topk_weights_RK[r, k].to(y_SH.dtype)
                slot = r * K + k
                out_RH[r] += weight * y_SH[slot if positions is None else int(positions[slot])]
    return out_RH

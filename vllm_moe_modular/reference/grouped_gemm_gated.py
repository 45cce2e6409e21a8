"""The meaning of `kernels.grouped_gemm_gated`, block by block, in the dtype of `x_RH`."""

from collections.abc import Callable, Iterable

import torch


def grouped_gemm_gated(
    x_RH: torch.Tensor,
    w13: torch.Tensor,
    sorted_slots: torch.Tensor,
    blocks: Iterable[tuple[int, int, int]],
    *,
    top_k: int,
    activation: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None = None,
    topk_weights_RK: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, F]; zero where a position is in no block."""
    out_SF = x_RH.new_zeros(sorted_slots.numel(), w13.shape[1] // 2)
    for expert, start, rows in blocks:
        slots = sorted_slots[start : start + rows].long()
        x = x_RH[slots // top_k]
        if topk_weights_RK is not None:
            x = x * topk_weights_RK.flatten()[slots, None].to(x.dtype)
        gate_up = x @ w13[expert].T
        if bias is not None:
            gate_up = gate_up + bias[expert]
        out_SF[start : start + rows] = activation(gate_up)
    return out_SF

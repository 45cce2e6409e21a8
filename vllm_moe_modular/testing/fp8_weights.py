"""Quantised weights out of plain ones, as a checkpoint's author makes them."""

import torch
from torch.nn.functional import pad

from vllm_moe_modular.modular.fp8 import BLOCK


def fp8_weights(w_ND: torch.Tensor, *, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [N, D] with float32 scales, per output channel [N] or per block [N/128, D/128] rounded up."""
    N, D = w_ND.shape
    if not blocks:
        scale = w_ND.float().abs().amax(dim=1) / 448
        return (w_ND.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
    rows, columns = -(-N // BLOCK), -(-D // BLOCK)
    tiles = pad(w_ND.float(), (0, -D % BLOCK, 0, -N % BLOCK)).view(rows, BLOCK, columns, BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)) / 448
    values = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:N, :D]
    return values.contiguous().to(torch.float8_e4m3fn), scale

"""The meaning of `kernels.gated_activation`, in the dtype of its argument."""

import torch
from torch.nn.functional import gelu, silu


def gated_activation(
    gate_up: torch.Tensor, *, name: str, limit: float | None, alpha: float, beta: float, interleaved: bool
) -> torch.Tensor:
    """[..., 2F] to [..., F]."""
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if name == "silu":
        return silu(gate) * up
    if name in ("gelu", "gelu_tanh"):
        return gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    raise ValueError(f"activation {name!r} is not one of silu, gelu, gelu_tanh, swiglu_oai")

"""The meaning of a mixture-of-experts layer: all experts, no ranks, one token after the other, in float64."""

import math

import torch

from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized


def moe_layer(
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    router_weight_on_input: bool = False,
) -> torch.Tensor:
    """out[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k], x[t]).

    Args:
        x_TH: [T, H].
        topk_ids_TK: [T, K], global ids; -1 leaves the term out.
        topk_weights_TK: [T, K]; what lies behind -1 is not read.
        weights: of all experts.
        router_weight_on_input: the weight multiplies the expert's input instead of its output.

    Returns:
        [T, H], float64.
    """
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for t, (ids, router_weights) in enumerate(zip(topk_ids_TK.tolist(), topk_weights_TK.tolist(), strict=True)):
        x_H = x_TH[t].double()
        for e, weight in zip(ids, router_weights, strict=True):
            if e < 0:
                continue
            if router_weight_on_input:
                out_TH[t] += expert(weight * x_H, weights, e, activation)
            else:
                out_TH[t] += weight * expert(x_H, weights, e, activation)
    return out_TH


def expert(x_H: torch.Tensor, weights: ExpertWeights, e: int, activation: Activation) -> torch.Tensor:
    """w2 @ act(w13 @ x + w13_bias) + w2_bias of expert `e`: [H], float64."""
    h = _of_expert(weights.w13, weights.w13_scale, e) @ x_H
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[e].double()
    y_H = _of_expert(weights.w2, weights.w2_scale, e) @ activated(h, activation)
    if weights.w2_bias is not None:
        y_H = y_H + weights.w2_bias[e].double()
    return y_H


def _of_expert(w: torch.Tensor, scale: torch.Tensor | None, e: int) -> torch.Tensor:
    return w[e].double() if scale is None else dequantized(w[e], scale[e], torch.float64)


def activated(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[2F] to [F], or [F] to [F] for an activation without a gate; the formulas stand with `Activation`."""
    if not activation.kind.is_gated:
        gate, up = h, torch.ones_like(h)
    elif activation.interleaved:
        gate, up = h[0::2], h[1::2]
    else:
        gate, up = h[: len(h) // 2], h[len(h) // 2 :]
    if activation.limit is not None:
        gate = torch.minimum(gate, torch.tensor(activation.limit))
        if activation.kind.is_gated:
            up = torch.maximum(torch.minimum(up, torch.tensor(activation.limit)), torch.tensor(-activation.limit))
    match activation.kind:
        case ActivationKind.SILU | ActivationKind.SILU_NO_MUL:
            return gate / (1 + torch.exp(-gate)) * up
        case ActivationKind.GELU | ActivationKind.GELU_NO_MUL:
            return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
        case ActivationKind.GELU_TANH:
            return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        case ActivationKind.SWIGLU_OAI:
            return gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.beta)
        case ActivationKind.RELU2_NO_MUL:
            return torch.clamp(gate, min=0) ** 2

"""Random weights and random steps of a shape, drawn so that they do not sit in the cache.

Letters: M tokens, K top-k, E experts, H hidden, F expert intermediate.
"""

from collections.abc import Sequence

import torch

from vllm_moe_modular.bench import shapes
from vllm_moe_modular.bench.shapes import Shape
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.testing.fp8_weights import fp8_weights

CUDA = torch.device("cuda")


def activation_of(shape: Shape) -> Activation:
    """Between the two GEMMs."""
    if shape.interleaved_swiglu:
        return Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)
    return Activation(kind=ActivationKind.SILU)


def dtype_of(shape: Shape) -> torch.dtype:
    """Of the rows."""
    return torch.bfloat16 if shape.fp8 else getattr(torch, shape.weights)


def random_weights(shape: Shape, device: torch.device = CUDA) -> ExpertWeights:
    """Scaled so that the outputs are of the order of one; biases only for gpt-oss."""

    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, device=device, dtype=dtype_of(shape)).normal_()

    E, H, F = shape.E, shape.H, shape.F
    if shape.fp8:
        w13, w13_scale = _random_fp8(E, 2 * F, H, device)
        w2, w2_scale = _random_fp8(E, H, F, device)
        return ExpertWeights(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
    biased = shape.interleaved_swiglu
    return ExpertWeights(
        w13=draw(E, 2 * F, H).div_(H**0.5),
        w2=draw(E, H, F).div_(F**0.5),
        w13_bias=draw(E, 2 * F) if biased else None,
        w2_bias=draw(E, H) if biased else None,
    )


def _random_fp8(E: int, N: int, D: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.empty(E, N, D, device=device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(E, -(-N // 128), -(-D // 128), device=device)
    for e in range(E):
        values, scale[e] = fp8_weights(torch.randn(N, D, device=device) / D**0.5, blocks=True)
        w[e].copy_(values)
    return w, scale


def random_steps(shape: Shape, M: int, count: int, device: torch.device = CUDA) -> list[StandardRows]:
    """Steps with routing drawn afresh: one after the other they find the weights of their experts outside L2."""
    return [
        StandardRows(
            x=torch.randn(M, shape.H, device=device, dtype=dtype_of(shape)),
            topk_ids=torch.rand(M, shape.E, device=device).topk(shape.K).indices.int(),
            topk_weights=torch.rand(M, shape.K, device=device).softmax(-1),
        )
        for _ in range(count)
    ]


def roof_us(shape: Shape, steps: Sequence[StandardRows]) -> float:
    """The mean over steps of what `shapes.roof_us` says."""
    roofs = [shapes.roof_us(shape, len(step.x), torch.unique(step.topk_ids).numel()) for step in steps]
    return sum(roofs) / len(roofs)

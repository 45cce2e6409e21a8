"""From float32 weights to quantised tensors and back, in the layouts that vLLM's loaders read.

    fp8      weight ~ float8_e4m3 * scale, one scale per 128 x 128 block, per tensor or per output channel
    awq      weight ~ (code - zero) * scale, codes and zeros 0..15, one scale and zero per output and group of inputs
    mxfp4    weight ~ e2m1 * 2 ** (byte - 127), one byte per output and 32 inputs

A scale keeps 4 significant bits, an fp8 number and a difference of two codes have at most 4 too: their product has 8,
which bfloat16 holds. A dequantised weight is therefore the same number in float32 and in bfloat16, in whatever order it
is computed. Each `encode_*` takes a matrix [out, in] in float32; `decode` gives it back.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from vllm_moe_modular.testing.checkpoints.quantization import FP8_BLOCK, MXFP4_BLOCK

FP8_MAX = 448.0  # the largest float8_e4m3fn
AWQ_LARGEST = 15
# Nibble i of an int32, counted from the lowest, holds column AWQ_ORDER[i] of 8: the order of AutoAWQ's GEMM format.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lowest 3 bits of a code; the 4th is the sign
E8M0_BIAS = 127


def round_up_to_4_bits(scale: torch.Tensor) -> torch.Tensor:
    """The smallest numbers of 4 significant bits that are not below `scale`, elementwise; 1 where that is 0."""
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.where(scale > 0, torch.ldexp((mantissa * 16).ceil() / 16, exponent), 1.0)


def encode_fp8_block(weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight` [N, K] float8_e4m3fn and `weight_scale_inv` [ceil(N / 128), ceil(K / 128)] float32."""
    n, k = (-(-size // FP8_BLOCK) for size in weight_NK.shape)
    padded = weight_NK.new_zeros(n * FP8_BLOCK, k * FP8_BLOCK)
    padded[: weight_NK.shape[0], : weight_NK.shape[1]] = weight_NK
    scale = _fp8_scale(padded.view(n, FP8_BLOCK, k, FP8_BLOCK).abs().amax(dim=(1, 3)))
    return {"weight": _fp8(weight_NK, _spread(scale, weight_NK)), "weight_scale_inv": scale}


def encode_fp8_tensor(weight_NK: torch.Tensor, largest: float) -> dict[str, torch.Tensor]:
    """`weight` [N, K] float8_e4m3fn and `weight_scale` [] float32, so that `largest` is the largest that fits."""
    scale = _fp8_scale(torch.tensor(largest))
    return {"weight": _fp8(weight_NK, scale), "weight_scale": scale}


def encode_fp8_channel(weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight` [N, K] float8_e4m3fn and `weight_scale` [N, 1] float32."""
    scale = _fp8_scale(weight_NK.abs().amax(dim=1, keepdim=True))
    return {"weight": _fp8(weight_NK, scale), "weight_scale": scale}


def encode_awq(weight_NK: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """`qweight` [K, N / 8] int32, `qzeros` [K / group, N / 8] int32, `scales` [K / group, N] float16."""
    weight_GgN = weight_NK.t().reshape(-1, group, weight_NK.shape[0])
    low, high = weight_GgN.amin(dim=1).clamp(max=0), weight_GgN.amax(dim=1).clamp(min=0)
    scale_GN = round_up_to_4_bits((high - low) / AWQ_LARGEST)
    zero_GN = (-low / scale_GN).round().clamp(0, AWQ_LARGEST)
    code = ((weight_GgN / scale_GN[:, None]).round() + zero_GN[:, None]).clamp(0, AWQ_LARGEST)
    return {"qweight": _pack_awq(code.flatten(0, 1)), "qzeros": _pack_awq(zero_GN), "scales": scale_GN.half()}


def encode_mxfp4(weight_EKN: torch.Tensor) -> dict[str, torch.Tensor]:
    """`blocks` [E, N, K / 32, 16] uint8, two codes a byte, the even one low, and `scales` [E, N, K / 32] uint8.

    The input is as gpt_oss holds it unquantised: [E, in, out].
    """
    experts, _, outputs = weight_EKN.shape
    block_ENBk = weight_EKN.transpose(1, 2).reshape(experts, outputs, -1, MXFP4_BLOCK)
    largest = block_ENBk.abs().amax(dim=-1)
    exponent = torch.where(largest > 0, (largest / E2M1[-1]).log2().ceil(), 0.0)
    scaled = torch.ldexp(block_ENBk, -exponent[..., None])
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    code = torch.bucketize(scaled.abs().contiguous(), between) + 8 * (scaled < 0)
    blocks = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponent + E8M0_BIAS).to(torch.uint8)}


def decode(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The float32 weight of what one of the `encode_*` made, in the shape that it took."""
    if "qweight" in parts:
        scale_GN = parts["scales"].float()
        code, zero = _unpack_awq(parts["qweight"]), _unpack_awq(parts["qzeros"])
        group = code.shape[0] // zero.shape[0]
        return ((code - zero.repeat_interleave(group, 0)) * scale_GN.repeat_interleave(group, 0)).t().contiguous()
    if "blocks" in parts:
        code = torch.stack([parts["blocks"] & 15, parts["blocks"] >> 4], dim=-1).flatten(-2)
        value = torch.tensor([*E2M1, *(-v for v in E2M1)])[code.int()]
        exponent = parts["scales"].int() - E8M0_BIAS
        return torch.ldexp(value, exponent[..., None]).flatten(2).transpose(1, 2).contiguous()
    weight = parts["weight"].float()
    return weight * (
        _spread(parts["weight_scale_inv"], weight) if "weight_scale_inv" in parts else parts["weight_scale"]
    )


def _fp8_scale(largest: torch.Tensor) -> torch.Tensor:
    return round_up_to_4_bits(largest / FP8_MAX)


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _spread(scale: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """A scale per 128 x 128 block, repeated for every element."""
    rows, columns = weight_NK.shape
    return scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def _pack_awq(codes_XN: torch.Tensor) -> torch.Tensor:
    """[X, N] numbers 0..15 to [X, N / 8] int32."""
    columns = codes_XN.to(torch.int64).reshape(len(codes_XN), -1, 8)[:, :, list(AWQ_ORDER)]
    packed = (columns << torch.arange(0, 32, 4)).sum(dim=-1)  # up to 2**32 - 1: the top bit becomes the sign
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _unpack_awq(packed_XP: torch.Tensor) -> torch.Tensor:
    """[X, N / 8] int32 to [X, N] numbers 0..15 in float32."""
    nibbles = packed_XP[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    codes = torch.empty_like(nibbles)
    codes[:, :, list(AWQ_ORDER)] = nibbles
    return codes.flatten(1).float()

"""fp8 weights as vLLM's quant methods load them, for experts of ours that read them unprocessed.

Letters: E local experts, N output columns (2F of the first GEMM, H of the second), K inputs.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.utils import replace_parameter

_NAMES = ("weight_scale_inv", "weight_scale")  # of blocks in vLLM's own format, and else


def fp8_scheme(quant_method: Any) -> str | None:
    """The scheme as `quant_scheme` of a config.json gives it; None: the method is not one of fp8."""
    if type(quant_method) not in (Fp8MoEMethod, CompressedTensorsW8A8Fp8MoEMethod):
        return None
    name = "fp8" if type(quant_method) is Fp8MoEMethod else "compressed-tensors float8"
    block = _block_of(quant_method)
    return name if block is None else f"{name} {'x'.join(map(str, block))}"


def keep_fp8_weights(module: Any) -> None:
    """In the place of what vLLM would do with loaded weights: scales of whole tensors become scales of columns."""
    for weight in ("w13", "w2"):
        name, scale = _scale_of(module, weight)
        E, N, _ = getattr(module, f"{weight}_weight").shape
        if scale.ndim <= 2 and scale.shape != (E, N):  # [E], or [E, 2] for gate and up
            parts = scale.reshape(E, -1)
            columns = parts.repeat_interleave(N // parts.shape[1], dim=1)
            replace_parameter(module, name, torch.nn.Parameter(columns.contiguous(), requires_grad=False))


def fp8_scale(module: Any, weight: str) -> torch.Tensor:
    """The scale of `w13` or `w2` after `keep_fp8_weights`: [E, N], or [E, N/128, K/128] rounded up."""
    _, scale = _scale_of(module, weight)
    by_column = scale.ndim == 3 and scale.shape[1:] == (getattr(module, f"{weight}_weight").shape[1], 1)
    return scale.squeeze(-1) if by_column else scale


def _scale_of(module: Any, weight: str) -> tuple[str, Any]:
    return next((n, getattr(module, n)) for n in (f"{weight}_{name}" for name in _NAMES) if hasattr(module, n))


def fp8_quant_config(module: Any, quant_method: Any) -> Any:
    """What vLLM's readers find as `moe_quant_config` of kept weights.

    Not that of the kernel that vLLM chose: FlashInfer's multiplies scales that only its own processing makes fit.
    """
    return fp8_w8a8_moe_quant_config(
        w1_scale=fp8_scale(module, "w13"), w2_scale=fp8_scale(module, "w2"), block_shape=_block_of(quant_method)
    )


def _block_of(quant_method: Any) -> list[int] | None:
    """Rows and columns that share a scale, where they do."""
    return getattr(quant_method, "moe_block_shape", None) or quant_method.weight_block_size

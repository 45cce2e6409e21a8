"""What experts on DeepGEMM's grouped GEMMs ask of a call, with the same words.

Letters: E experts, N output channels, D summed dimension.
"""

import torch

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import Rows

MULTIPLE = {torch.bfloat16: 64, torch.float8_e4m3fn: GROUP}
"""Of the hidden and the intermediate size, by the weights' dtype: a block of the contraction is 128 bytes."""


def require_deep_gemm(rows: Rows, weights: ExpertWeights, where: str) -> None:
    """Check dtypes, sizes, strides and scales.

    Args:
        where: who is asking, for the message: "the deep_gemm experts".

    Raises:
        UnsupportedError: activations that are not bfloat16; rows in fp8 with weights that are not; weights of a dtype,
            a size or strides that DeepGEMM does not take, with biases, or without a scale for each 128 x 128 in fp8.
    """

    def unsupported(what: str, instead: str) -> UnsupportedError:
        return UnsupportedError(f"{what} in {where}", instead=instead)

    _, H, F = weights.w2.shape
    if rows.dtype != torch.bfloat16:
        raise unsupported(f"rows in {rows.dtype}", "serve with --dtype bfloat16")
    if rows.x_scale is not None and weights.w2.dtype == torch.bfloat16:
        raise unsupported(
            "rows in fp8 with unquantised weights", "choose an all-to-all that sends the rows as they are"
        )
    for name, w in (("w13", weights.w13), ("w2", weights.w2)):
        if w.dtype not in MULTIPLE or w.dtype != weights.w2.dtype:
            raise unsupported(f"{name} in {w.dtype}", "use the triton or the torch experts")
        if not w.is_contiguous():
            raise unsupported(f"{name} with strides {w.stride()}", "use the torch experts")
    for name, size in (("hidden", H), ("intermediate", F)):
        if size % MULTIPLE[weights.w2.dtype]:
            raise unsupported(
                f"{name} size {size} with {weights.w2.dtype}",
                f"it takes multiples of {MULTIPLE[weights.w2.dtype]}; use the triton or the torch experts",
            )
    if weights.w13_bias is not None or weights.w2_bias is not None:
        raise unsupported("a bias", "use the triton experts")
    if weights.w2.dtype == torch.bfloat16:
        return
    for name, w, scale in (("w13", weights.w13, weights.w13_scale), ("w2", weights.w2, weights.w2_scale)):
        E, N, D = w.shape
        blocks = (E, -(-N // GROUP), D // GROUP)
        if scale is None or scale.shape != blocks or scale.dtype != torch.float32 or not scale.is_contiguous():
            got = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise unsupported(
                f"{name} in {w.dtype} with scales {got}",
                f"it takes contiguous float32 {list(blocks)}, one for 128 x 128; use the triton or the torch experts",
            )

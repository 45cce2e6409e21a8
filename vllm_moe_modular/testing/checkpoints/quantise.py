"""A whole model quantised, and back: which of its tensors are replaced by which."""

import re
from collections.abc import Mapping

import torch

from vllm_moe_modular.testing.checkpoints import codecs
from vllm_moe_modular.testing.checkpoints.families import Family, Sizes
from vllm_moe_modular.testing.checkpoints.quantization import awq_group

# vLLM holds the first and the second of each pair in one tensor, with one scale where scales are per tensor.
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"))
# Of a quantised tensor: the weight that it belongs to, and which part of it this is.
PART = re.compile(
    r"(?P<stem>.*\.experts\..+?)(\.(?P<own>weight|weight_scale|weight_scale_inv|qweight|qzeros|scales)"
    r"|_(?P<shared>blocks|scales))"
)


def quantise(
    tensors: Mapping[str, torch.Tensor], kind: str, family: Family, sizes: Sizes
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of the quantised model, and the names of the linear layers that are not quantised.

    Everything else becomes bfloat16, as in published checkpoints, so that no loader has to round it.
    """
    is_expert = re.compile(re.escape(family.expert).replace(r"\{e\}", r"\d+") + r"(.+\.weight|(gate_up|down)_proj)$")
    made: dict[str, torch.Tensor] = {}
    ignored = []
    for name, weight in tensors.items():
        if is_expert.search(name):
            made |= _encode(name, tensors, kind, sizes)
            continue
        made[name] = weight.to(torch.bfloat16)
        if weight.dim() == 2 and name.endswith(".weight") and "embed_tokens" not in name:
            ignored.append(name.removesuffix(".weight"))
    return made, ignored


def dequantise_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in float32 under the names that the model has unquantised."""
    made: dict[str, torch.Tensor] = {}
    quantised: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = PART.fullmatch(name)
        if match is None:
            made[name] = tensor.float()
            continue
        weight = match["stem"] if match["shared"] else f"{match['stem']}.weight"
        quantised.setdefault(weight, {})[match["own"] or match["shared"]] = tensor
    return made | {name: codecs.decode(parts) for name, parts in quantised.items()}


def _encode(name: str, tensors: Mapping[str, torch.Tensor], kind: str, sizes: Sizes) -> dict[str, torch.Tensor]:
    weight = tensors[name]
    if kind == "mxfp4":
        return {f"{name}_{part}": tensor for part, tensor in codecs.encode_mxfp4(weight).items()}
    if kind == "fp8_block":
        parts = codecs.encode_fp8_block(weight)
    elif kind == "fp8_tensor":
        largest = max(float(tensors[other].abs().max()) for other in _sharing_a_scale(name))
        parts = codecs.encode_fp8_tensor(weight, largest)
    elif kind == "fp8_channel":
        parts = codecs.encode_fp8_channel(weight)
    elif kind == "awq":
        parts = codecs.encode_awq(weight, awq_group(sizes))
    else:
        raise LookupError(f"no codec for the quantisation {kind}; add one to {__name__}")
    return {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}


def _sharing_a_scale(name: str) -> list[str]:
    """The names of the weights, `name` among them, that have one scale per expert in vLLM.

    Where their scales differ, vLLM quantises one of them again, and the numbers are no longer those of the checkpoint.
    """
    for pair in FUSED:
        for one in pair:
            if name.endswith(f".{one}.weight"):
                return [f"{name.removesuffix(f'{one}.weight')}{other}.weight" for other in pair]
    return [name]

"""The kinds of quantised experts that vLLM serves, as data: which family, which sizes, which configuration.

Only the routed experts are quantised; `ignored` in a configuration names every other linear layer, without `.weight`.
The numbers themselves are in `codecs`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vllm_moe_modular.testing.checkpoints.families import Family, Sizes

FP8_BLOCK = 128  # rows and columns that share a scale in DeepSeek's checkpoint format
AWQ_GROUPS = (128, 64, 32)  # input elements that share a scale: what vLLM's AWQ-Marlin experts take
AWQ_HIDDEN = 128  # vLLM's AWQ-Marlin experts take multiples of it
MXFP4_BLOCK = 32  # elements that share an exponent, by the OCP MX specification


@dataclass(frozen=True, slots=True)
class Quantization:
    """One kind. `config` makes `quantization_config` of the sizes and the names of the layers that stay as they are.

    `hidden` and `intermediate` have to be multiples of the two numbers of those names, in elements. `families` are the
    families that have this kind, empty for all whose experts each have tensors of their own.
    """

    config: Callable[[Sizes, Sequence[str]], dict[str, object]]
    hidden: int = 1
    intermediate: int = 1
    families: tuple[str, ...] = ()
    # Two scale blocks along one side and one along the other: a transposed scale does not fit.
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"hidden": 256, "intermediate": 128}))


def awq_group(sizes: Sizes) -> int:
    """The largest group, in input elements, of which both matrices of an expert have two or more.

    vLLM 0.26 orders the scales of both matrices as those of one group where `intermediate` is a group.
    """
    inputs = (sizes.hidden, sizes.intermediate)
    return next(group for group in AWQ_GROUPS if all(size % group == 0 and size > group for size in inputs))


def _fp8_block(_sizes: Sizes, ignored: Sequence[str]) -> dict[str, object]:
    return {**_fp8_tensor(_sizes, ignored), "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


def _fp8_tensor(_sizes: Sizes, ignored: Sequence[str]) -> dict[str, object]:
    return {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "modules_to_not_convert": list(ignored),
    }


def _fp8_channel(_sizes: Sizes, ignored: Sequence[str]) -> dict[str, object]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None},
    }


def _awq(sizes: Sizes, ignored: Sequence[str]) -> dict[str, object]:
    return {
        **{"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True, "group_size": awq_group(sizes)},
        "modules_to_not_convert": list(ignored),
    }


def _mxfp4(_sizes: Sizes, ignored: Sequence[str]) -> dict[str, object]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}


QUANTIZATIONS: Mapping[str, Quantization] = {
    "fp8_block": Quantization(_fp8_block, hidden=FP8_BLOCK, intermediate=FP8_BLOCK),
    "fp8_tensor": Quantization(_fp8_tensor),
    "fp8_channel": Quantization(_fp8_channel),
    "awq": Quantization(_awq, hidden=AWQ_HIDDEN, intermediate=2 * AWQ_GROUPS[-1]),
    "mxfp4": Quantization(_mxfp4, hidden=MXFP4_BLOCK, intermediate=MXFP4_BLOCK, families=("gpt_oss",)),
}


def sizes_for(family: Family, quantization: str | None) -> Sizes:
    """The sizes that are taken where the caller names none."""
    return replace(family.sizes, **QUANTIZATIONS[quantization].sizes) if quantization else family.sizes


def quantization_objections(name: str, family: Family, quantization: str, sizes: Sizes) -> list[str]:
    """Every reason why family `name` cannot be quantised so, each one sentence; empty when it can."""
    kind = QUANTIZATIONS[quantization]
    objections = []
    if kind.families and name not in kind.families:
        objections.append(f"quantization {quantization} is for {', '.join(kind.families)} alone")
    if not kind.families and "{e}" not in family.expert:
        fitting = sorted(label for label, other in QUANTIZATIONS.items() if name in other.families)
        objections.append(
            f"quantization {quantization} wants tensors of its own for each expert, and {name} holds all experts of a "
            f"layer in one; choose one of {', '.join(fitting) or 'no quantization'}"
        )
    for label, value, multiple in (
        ("hidden", sizes.hidden, kind.hidden),
        ("intermediate", sizes.intermediate, kind.intermediate),
    ):
        if value % multiple:
            objections.append(f"{label} is {value}; quantization {quantization} wants a multiple of {multiple}")
    return objections

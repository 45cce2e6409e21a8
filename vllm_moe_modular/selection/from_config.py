"""The MoE layers of a Hugging Face `config.json` as problems. Standard library only: no torch, vLLM, transformers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from reprlib import repr as short
from typing import Any, NamedTuple

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.selection.problem import Problem

Config = Mapping[str, Any]

MOST_LAYERS = 10_000
"""Far more than models have: more is a slip, and each layer is looked at."""


class ModelConfigError(MoEModularError, ValueError):
    """A configuration that does not describe MoE layers that are known here, or cannot be served as asked."""


class LayerShape(NamedTuple):
    """Layers that are alike.

    Attributes:
        layers: how many.
        which: their numbers, for people: "3-60", "1, 3, ..., 47".
    """

    problem: Problem
    layers: int
    which: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model family spells its MoE layers, and how vLLM builds them.

    Attributes:
        experts, intermediate: the keys of the number of routed experts and of the intermediate size of one.
        has_experts: whether a layer, by its number, has experts.
        module: the module that holds them, with `{i}` for the layer's number.
        sequence_parallel: vLLM gives each tensor-parallel rank its own slice of the tokens, under expert parallelism
            with tensor and data parallelism; in the other families the ranks all keep all tokens.
    """

    experts: str
    intermediate: str
    has_experts: Callable[[Config, int], bool] = lambda config, layer: True  # noqa: ARG005
    module: str = "model.layers.{i}.mlp.experts"
    sequence_parallel: bool = False
    activation: str = "silu"
    has_bias: bool = False
    router_weight_on_input: bool = False


def _after_dense(config: Config, layer: int) -> bool:
    first, every = _optional(config, "first_k_dense_replace", 0), _optional(config, "moe_layer_freq", 1)
    return layer >= first and layer % every == 0


def _by_sparse_step(config: Config, layer: int) -> bool:
    listed = config.get("mlp_only_layers")
    if listed is None:
        listed = ()
    elif not isinstance(listed, list) or not all(isinstance(number, int) for number in listed):
        raise _wrong("mlp_only_layers", listed, "a list of layer numbers")
    return layer not in listed and (layer + 1) % _optional(config, "decoder_sparse_step", 1) == 0


def _interleaved(config: Config, layer: int) -> bool:
    return (layer + 1) % _optional(config, "interleave_moe_layer_step", 1) == 0


_DEEPSEEK = Family(
    experts="n_routed_experts",
    intermediate="moe_intermediate_size",
    has_experts=_after_dense,
    sequence_parallel=True,
)
_QWEN2 = Family(experts="num_experts", intermediate="moe_intermediate_size", has_experts=_by_sparse_step)
_QWEN3 = Family(
    experts="num_experts", intermediate="moe_intermediate_size", has_experts=_by_sparse_step, sequence_parallel=True
)
_LLAMA4 = Family(
    experts="num_local_experts",
    intermediate="intermediate_size",
    has_experts=_interleaved,
    module="language_model.model.layers.{i}.feed_forward.experts",
    sequence_parallel=True,
    router_weight_on_input=True,
)

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": Family(experts="n_routed_experts", intermediate="moe_intermediate_size", has_experts=_after_dense),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": _QWEN3,
    "mixtral": Family(
        experts="num_local_experts",
        intermediate="intermediate_size",
        module="model.layers.{i}.block_sparse_moe.experts",
    ),
    "olmoe": Family(experts="num_experts", intermediate="intermediate_size"),
    "gpt_oss": Family(
        experts="num_local_experts",
        intermediate="intermediate_size",
        sequence_parallel=True,
        activation="swigluoai",
        has_bias=True,
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
}
"""By `model_type`."""


def problems_from_config(
    config: Config,
    *,
    tp: int,
    dp: int,
    pcp: int = 1,
    ep: bool,
    redundant_experts: int = 0,
    dtype: str = "auto",
) -> list[LayerShape]:
    """The MoE layers of a model as vLLM would serve them, alike ones together, first ones first.

    What does not depend on the model (hosts, capacity, CUDA graphs) has the defaults of `Problem`; replace it there.
    Drafter layers (multi-token prediction) are left out: they are served only on request, and have the same shape.

    Args:
        config: as decoded from `config.json`.
        tp, dp, pcp: ranks of each kind.
        ep: --enable-expert-parallel.
        redundant_experts: more physical than logical experts, over all ranks (EPLB).
        dtype: of the activations; "auto" is the checkpoint's, and bfloat16 for one in float32, as in vLLM.

    Raises:
        ModelConfigError: the model type is not known, a value is missing or of the wrong kind, no layer has experts, or
            the ranks cannot share the experts in this way.
    """
    text, family = _find_family(config)
    ranks = tp * dp * pcp
    hidden, top_k = _required(text, "hidden_size"), _required(text, "num_experts_per_tok")
    experts = _required(text, family.experts)
    if top_k > experts:
        raise ModelConfigError(f"config.json: num_experts_per_tok is {top_k}, {family.experts} is {experts}")
    ep_size = ranks if ep else 1
    physical = experts + redundant_experts
    intermediate = _required(text, family.intermediate)
    layers: dict[Problem, list[int]] = {}
    quantization = _quantization(config, text)
    num_layers = _required(text, "num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise _wrong("num_hidden_layers", num_layers, f"a whole number, {MOST_LAYERS} at most")
    for layer in range(num_layers):
        if not family.has_experts(text, layer):
            continue
        unquantised = not quantization or _is_excluded(quantization, family.module.format(i=layer))
        problem = Problem(
            num_experts=physical,
            num_local_experts=-(-physical // ep_size),
            top_k=top_k,
            hidden=hidden,
            intermediate=_per_rank(intermediate, 1 if ep else ranks, {} if unquantised else quantization),
            activation=family.activation,
            has_bias=family.has_bias,
            dtype=_dtype(config, text, dtype),
            quant_scheme="none" if unquantised else quant_scheme(quantization),
            router_weight_on_input=family.router_weight_on_input,
            tp_size=tp,
            dp_size=dp,
            pcp_size=pcp,
            ep_size=ep_size,
            sequence_parallel=family.sequence_parallel and ep and tp > 1 and dp > 1,
            eplb=redundant_experts > 0,
        )
        layers.setdefault(problem, []).append(layer)
    if not layers:
        raise ModelConfigError("config.json describes no MoE layer: none of its layers has experts")
    return [LayerShape(problem, len(numbers), which(numbers)) for problem, numbers in layers.items()]


def quant_scheme(quantization: Config) -> str:
    """A `quantization_config` in a few words: "fp8 128x128", "mxfp4", "awq 4-bit", "compressed-tensors int4"."""
    method = str(quantization.get("quant_method", "unknown")).lower()
    if block := quantization.get("weight_block_size"):
        return f"{method} {'x'.join(map(str, block))}"
    if isinstance(groups := quantization.get("config_groups"), Mapping):
        weights = [g.get("weights") or {} for g in groups.values() if isinstance(g, Mapping)]
        kinds = dict.fromkeys(f"{w.get('type', 'int')}{w.get('num_bits', '')}" for w in weights)
        return " ".join([method, *kinds])
    bits = next((quantization[k] for k in ("bits", "w_bit") if k in quantization), None)
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        bits = 4 if quantization.get("load_in_4bit") else 8
    algorithm = (quantization.get("quantization") or quantization).get("quant_algo")
    detail = f" {bits}-bit" if bits is not None else f" {algorithm}" if algorithm else ""
    return method + detail


def which(numbers: Sequence[int]) -> str:
    """Ascending layer numbers for people."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _find_family(config: Config) -> tuple[Config, Family]:
    """The part of the configuration that describes the language model, and its family."""
    nested = config.get("text_config")
    candidates = [config, nested] if isinstance(nested, Mapping) else [config]
    for candidate in reversed(candidates):  # a model with images keeps the numbers in text_config
        family = FAMILIES.get(str(candidate.get("model_type")))
        if family is not None:
            return candidate, family
    found = config.get("model_type")
    what = "config.json has no model_type" if found is None else f"model_type {found!r} is not known here"
    raise ModelConfigError(f"{what}; known: {', '.join(sorted(FAMILIES))}")


def _required(config: Config, key: str) -> int:
    if config.get(key) is None:
        raise ModelConfigError(f"config.json (model_type {config.get('model_type')}) has no {key}; is it a MoE model?")
    return _count(key, config[key], least=1)


def _optional(config: Config, key: str, default: int) -> int:
    value = config.get(key)
    return default if value is None else _count(key, value, least=min(default, 1))


def _count(key: str, value: object, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(key, value, f"a whole number, at least {least}")
    return value


def _wrong(key: str, value: object, takes: str) -> ModelConfigError:
    return ModelConfigError(f"config.json: {key} is {short(value)}; it must be {takes}")


def _dtype(config: Config, text: Config, asked_for: str) -> str:
    if asked_for != "auto":
        return asked_for
    keys = [c.get(key) for c in (text, config) for key in ("dtype", "torch_dtype")]
    stored = str(next((k for k in keys if k), "bfloat16")).removeprefix("torch.")
    return "bfloat16" if stored == "float32" else stored


def _per_rank(intermediate: int, slices: int, quantization: Config) -> int:
    """The intermediate size of a rank where every expert is cut into `slices`."""
    mine, rest = divmod(intermediate, slices)
    block = quantization.get("weight_block_size") or (1,)
    if rest or (slices > 1 and mine % block[0]):
        what = f"a multiple of the {block[0]} of the weights' scale blocks" if block[0] > 1 else "a whole number"
        raise ModelConfigError(
            f"without expert parallelism each of {slices} ranks would hold {intermediate / slices:g} of the "
            f"{intermediate} columns of every expert, which is not {what}; enable expert parallel "
            "(--enable-expert-parallel) or use fewer ranks"
        )
    return mine


def _quantization(config: Config, text: Config) -> Config:
    for candidate in (config, text):
        for key in ("quantization_config", "compression_config"):
            if (found := candidate.get(key)) is not None:
                if not isinstance(found, Mapping):
                    raise _wrong(key, found, "an object")
                _check_quantization(key, found)
                return found
    return {}


def _check_quantization(at: str, quantization: Config) -> None:
    """What is read of it below is of the right kind.

    Raises:
        ModelConfigError: it is not.
    """
    block = quantization.get("weight_block_size")
    if block is not None:
        numbers = block if isinstance(block, list) else []
        if len(numbers) != 2 or not all(type(n) is int and n >= 1 for n in numbers):
            raise _wrong(f"{at}.weight_block_size", block, "a list of two whole numbers, at least 1")
    groups = quantization.get("config_groups")
    for key, value in (("quantization", quantization.get("quantization")), ("config_groups", groups)):
        if value is not None and not isinstance(value, Mapping):
            raise _wrong(f"{at}.{key}", value, "an object")
    for name, group in (groups or {}).items():
        if not isinstance(group, Mapping):
            raise _wrong(f"{at}.config_groups.{name}", group, "an object")
        if group.get("weights") is not None and not isinstance(group["weights"], Mapping):
            raise _wrong(f"{at}.config_groups.{name}.weights", group["weights"], "an object")
    for key in _EXCLUDING_KEYS:
        patterns = quantization.get(key)
        if patterns is None:
            continue
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise _wrong(f"{at}.{key}", patterns, "a list of names")
        for pattern in patterns:
            try:
                re.compile(pattern[3:] if pattern.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as error:
                told = f"a name, or re: and a regular expression ({error})"
                raise _wrong(f"an entry of {at}.{key}", pattern, told) from error


_EXCLUDING_KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")


def _is_excluded(quantization: Config, module: str) -> bool:
    """Whether the checkpoint keeps these experts unquantised, by the names that it lists."""
    names = (module, f"{module}.0.gate_proj")
    for pattern in (str(p) for key in _EXCLUDING_KEYS for p in quantization.get(key) or ()):
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], name) for name in names):
                return True
        elif fnmatchcase(module, pattern) or f"{module}.".startswith(f"{pattern}.") or pattern.startswith(f"{module}."):
            return True
    return False

"""Random weights under which routing is decisive and every expert changes the output.

The usual standard deviation of 0.02 makes the experts of a tiny model vanish beside the residual stream, so that a
wrong expert still gives the right tokens. Here each matrix keeps the scale of its input (std = gain / sqrt(fan in)) and
the gains below make what an expert adds about as large as the residual stream.

Each tensor is drawn from its own generator, seeded by (seed, name): the weights do not depend on how a version of
transformers orders or fuses them.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights whose name matches are `mean + std * N(0, 1)`; `fan_in` divides std by the root of the input width."""

    pattern: str
    std: float
    mean: float = 0.0
    fan_in: bool = False


RULES = (
    Rule(r"norm\.weight$", std=0.1, mean=1.0),
    Rule(r"embed_tokens\.weight$", std=1.0),
    Rule(r"lm_head\.weight$", std=4.0, fan_in=True),
    Rule(r"e_score_correction_bias$", std=0.3),  # the scores it shifts lie in 0..1
    Rule(r"\.router\.bias$", std=0.5),
    Rule(r"\.(router|gate)\.weight$", std=2.0, fan_in=True),  # logits of std 2: one expert clearly first
    Rule(r"\.sinks$", std=1.0),
    Rule(r"experts\.(gate_up|down)_proj_bias$", std=0.5),
    Rule(r"bias$", std=0.2),
    # An activation of unit-scale inputs has a root mean square of about 0.4; 3 brings it back above 1.
    Rule(r"(down_proj|\.w2)(\.weight)?$", std=3.0, fan_in=True),
    Rule(r"(weight|gate_up_proj)$", std=1.0, fan_in=True),
)


def draw(name: str, shape: Iterable[int], *, seed: int) -> torch.Tensor:
    """The float32 weight `name`; the same for the same (seed, name, shape) wherever it is made."""
    shape = tuple(shape)
    rule = next((rule for rule in RULES if re.search(rule.pattern, name)), None)
    if rule is None:
        raise LookupError(f"no rule of {__name__} covers the weight {name}; add one")
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    # [out, in] of a linear layer and [E, in, out] of fused experts: the input width is the second dimension of both.
    std = rule.std / math.sqrt(shape[1]) if rule.fan_in else rule.std
    return torch.randn(shape, generator=generator).mul_(std).add_(rule.mean)


def draw_all(shapes: Mapping[str, Iterable[int]], *, seed: int) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint, by name."""
    return {name: draw(name, shape, seed=seed) for name, shape in shapes.items()}


def mtp_shapes(layer: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """What a DeepSeek multi-token-prediction layer has beside a decoder layer; eh_proj joins embedding and state."""
    prefix = f"model.layers.{layer}."
    norms = {f"{prefix}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return {**norms, f"{prefix}eh_proj.weight": (hidden, 2 * hidden)}


def mtp_copies(layer: int) -> dict[str, str]:
    """The weights that such a layer shares with the model: name in the layer, name in the model."""
    prefix = f"model.layers.{layer}."
    return {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }

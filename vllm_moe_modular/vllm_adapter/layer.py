"""What the common code asks of a MoE layer of any vLLM era. Each era's file answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.selection.problem import LAID_OUT, Problem

_PROCESSED = "_moe_modular_weights_processed"  # kept with a layer


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share the experts of a layer, and how they start out with tokens.

    Attributes:
        ep_rank, ep_size: in the expert-parallel group; 0 and 1 without one.
        tp_rank, tp_size: in the tensor-parallel group.
        tokens_sliced: each tensor-parallel rank already holds only its own tokens (sequence parallelism).
    """

    ep_rank: int
    ep_size: int
    tp_rank: int
    tp_size: int
    tokens_sliced: bool


class MoELayer(ABC):
    """One MoE layer as its era's adapter sees it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        """The module that owns `quant_method` and the weights."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The layer's name in the model, "model.layers.0.mlp.experts"."""

    @property
    def quant_method(self) -> Any:
        """vLLM's method, or ours once it was replaced."""
        return self.module.quant_method

    @property
    def is_swapped(self) -> bool:
        """Whether ours is in place."""
        return hasattr(self.quant_method, "modular_forward")

    @property
    @abstractmethod
    def problem(self) -> Problem:
        """The layer and how it is served."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """Who shares its experts."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.module.parameters()).device

    @property
    @abstractmethod
    def activation(self) -> Activation | None:
        """What lies between the GEMMs; None where it has no counterpart here."""

    @property
    def router_weight_on_input(self) -> bool:
        """The router's weights multiply the experts' input rather than their output."""
        return bool(self.module.apply_router_weight_on_input)

    @property
    @abstractmethod
    def expert_map(self) -> Sequence[int] | None:
        """[G], local number of each expert, -1 = not on this rank; None: all experts are here, in order."""

    def weights(self) -> ExpertWeights:
        """The weights as they are now; never kept, because reload, EPLB and wake-up write in place."""
        m: Any = self.module
        return ExpertWeights(
            w13=m.w13_weight,
            w2=m.w2_weight,
            w13_bias=getattr(m, "w13_bias", None),
            w2_bias=getattr(m, "w2_bias", None),
        )

    def keep_weights(self) -> None:  # noqa: B027 - unquantised weights are read as they were loaded
        """In the place of what vLLM does with loaded weights, where they are read as they are."""

    def quant_config_of_kept_weights(self, method: Any) -> Any:
        """What vLLM's readers find as `moe_quant_config` once the weights were kept."""
        return method.get_fused_moe_quant_config(self.module)

    def weights_were_processed(self) -> None:
        """Remember that vLLM has done it."""
        setattr(self.module, _PROCESSED, True)

    @property
    def weights_missing(self) -> str:
        """Why the weights cannot be read off the layer as a checkpoint stores them; empty: they can."""
        if getattr(self.module, _PROCESSED, False):
            return LAID_OUT
        for attribute in ("w13_weight", "w2_weight"):
            weight = getattr(self.module, attribute, None)
            if not isinstance(weight, torch.Tensor) or weight.ndim != 3:
                return f"the layer's {attribute} is not a plain [E, N, K] tensor; leave the layer to vLLM"
        return ""

    @abstractmethod
    def replace_quant_method(self, method: Any) -> None:
        """Put `method` in the place of the layer's own."""


def unwrapped(*models: Any) -> list[torch.nn.Module]:
    """The modules among `models`, out of what captures them in CUDA graphs or splits them into micro-batches."""
    bare = [m.unwrap() if hasattr(m, "unwrap") else m for m in models]
    return [m for m in bare if isinstance(m, torch.nn.Module)]


def make_activation(name: str, limit: float | None, alpha: float | None, beta: float | None) -> Activation | None:
    """vLLM's activation, with the constants that its kernels use where the model gives none."""
    if name == "swigluoai":  # gpt-oss: constants fixed in vLLM's kernel, gate and up interleaved
        return Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, alpha=1.702, beta=1.0, interleaved=True)
    if name == "swigluoai_uninterleave":
        return Activation(
            kind=ActivationKind.SWIGLU_OAI,
            limit=limit,
            alpha=1.0 if alpha is None else alpha,
            beta=0.0 if beta is None else beta,
        )
    kinds = {kind.value: kind for kind in ActivationKind}
    return Activation(kind=kinds[name], limit=limit) if name in kinds else None

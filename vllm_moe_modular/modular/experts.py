"""Permute-experts-unpermute: both GEMMs and the activation of the experts of one rank.

Letters: R rows after dispatch, K top-k, H hidden, F expert intermediate, E local experts, C capacity per expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.modular.prepare_finalize import Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec


class ActivationKind(Enum):
    """The function between the two GEMMs. Gated kinds turn 2F columns into F, the others keep F."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_OAI = "swiglu_oai"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        return not self.value.endswith("_no_mul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The activation with its constants.

    With gate g and up u, each clamped first where a limit is set (g <= limit, -limit <= u <= limit):
    silu, gelu, gelu_tanh: act(g) * u; swiglu_oai: g * sigmoid(alpha * g) * (u + beta).

    Attributes:
        limit: the clamp, or None.
        alpha, beta: of swiglu_oai; gpt-oss uses 1.702 and 1.
        interleaved: column 2i is gate i and column 2i+1 up i, as gpt-oss stores it; else all gates, then all ups.
    """

    kind: ActivationKind
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0
    interleaved: bool = False

    def __str__(self) -> str:
        """As a message has it, the constants that are not the usual ones included: "activation silu, limit 7.0"."""
        usual = Activation(kind=self.kind)
        told = [f"activation {self.kind.value}"]
        for name in ("limit", "alpha", "beta"):
            if (value := getattr(self, name)) != getattr(usual, name):
                told.append(f"{name} {value}")
        return ", ".join([*told, "interleaved"] if self.interleaved else told)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of this rank's experts, as checkpoints store them.

    A scale is float32 and belongs to weights in float8_e4m3fn: weight = stored number * scale. It is given per output
    channel (a scale of a whole tensor is repeated), or per block of 128 x 128; both tensors of a layer alike.

    Attributes:
        w13: [E, 2F, H] gate and up projection ([E, F, H] for an activation without a gate).
        w2: [E, H, F] down projection.
        w13_bias: [E, 2F] or None.
        w2_bias: [E, H] or None.
        w13_scale: [E, 2F], or [E, 2F/128, H/128] rounded up; None: unquantised.
        w2_scale: [E, H], or [E, H/128, F/128] rounded up; None: unquantised.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None


class PermuteExpertsUnpermute(ABC):
    """An expert kernel. Knows nothing of ranks; holds no per-call state and no copy of a weight."""

    activation_format: ClassVar[ActivationFormat]

    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]]
    """Where the weighted sum may be done when these experts are used."""

    topk_indices_dtype: ClassVar[torch.dtype | None] = None
    """The dtype that topk_ids must have; None: int32 and int64 both do."""

    compiles_by_rows: ClassVar[bool] = False
    """Whether steps of some sizes need kernels that others do not, which a compiler makes at the first of them. Of the
    standard format; blocks have one size."""

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:  # noqa: ARG002
        """The scratch tensors of one call of `apply` on such rows."""
        return ()

    @abstractmethod
    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,
        out_RH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the experts.

        Args:
            rows: in this kernel's activation format; never written to. There may be no rows.
            weights: of this rank's experts.
            workspace: as asked for by `workspace`, uninitialised.
            weight_and_reduce_by: one of those declared. EXPERTS: apply the router's weights and sum over top-k.
            router_weight_on_input: the weights multiply the input of the experts instead of their output. Only with
                EXPERTS; with FINALIZE whoever dispatched has applied them.
            out_RH: [R, H], not overlapping anything else; with EXPERTS the result may be written here and returned,
                which saves a copy.

        Returns:
            EXPERTS: [R, H]; FINALIZE: [R, K, H] (standard) or [E, C, H] (batched). Of `rows.dtype`.
        """

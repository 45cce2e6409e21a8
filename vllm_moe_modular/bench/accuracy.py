"""Whether a result may be timed: at most twice as wrong as plain torch in the same dtype, against float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_moe_modular.bench.problems import activation_of, dtype_of
from vllm_moe_modular.bench.shapes import Shape
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.reference.small_batch_down import small_batch_down
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated

SLACK = 2.0
"""How many times as wrong as plain torch."""

ROWS = 4
"""That are looked at, spread over the step."""


@dataclass(frozen=True)
class Judge:
    """The right answer for a few rows of a step.

    Attributes:
        rows: which ones.
        truth: [rows, H], float64.
        plain: relative error of plain torch in the dtype of the rows. In fp8 it quantises the rows and the activated
            rows as well, which float64 does not.
    """

    rows: torch.Tensor
    truth: torch.Tensor
    plain: float

    @classmethod
    def of(cls, shape: Shape, weights: ExpertWeights, step: StandardRows) -> "Judge":
        """For one step, which is not changed."""
        rows = torch.linspace(0, len(step.x) - 1, min(ROWS, len(step.x)), device=step.x.device).long()
        some = StandardRows(step.x[rows], step.topk_ids[rows], step.topk_weights[rows])
        truth = _layer(shape, weights, some, torch.float64)
        plain = _layer(shape, weights, some, dtype_of(shape))
        return cls(rows, truth, _relative(plain, truth))

    def error(self, got: torch.Tensor) -> float:
        """Relative error of what a layer returned for the whole step; NaN where it has one."""
        return _relative(got[self.rows].double(), self.truth)

    def objection(self, error: float) -> str | None:
        """Why such a result does not count, or None."""
        if error <= SLACK * self.plain:  # NaN is not
            return None
        return f"relative error {error:.2e} against {self.plain:.2e} of plain torch"


def worst_of(ratios: Sequence[float]) -> float:
    """The largest; NaN if one is."""
    return float("nan") if any(r != r for r in ratios) else max(ratios)


def _relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y - truth).norm() / truth.norm())


def _layer(shape: Shape, weights: ExpertWeights, rows: StandardRows, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, slot by slot, as float64."""
    a = activation_of(shape)
    activation = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    used = torch.unique(rows.topk_ids)
    few = torch.searchsorted(used, rows.topk_ids)

    def meant(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return w[used].to(dtype)
        return torch.stack([dequantized(w[e], scale[e], dtype) for e in used.tolist()])

    def on_the_way(x: torch.Tensor) -> torch.Tensor:
        quantise = shape.fp8 and dtype != torch.float64
        return dequantize_fp8(*quantize_fp8(x)).to(dtype) if quantise else x.to(dtype)

    w13, w2 = meant(weights.w13, weights.w13_scale), meant(weights.w2, weights.w2_scale)
    b13, b2 = (None if b is None else b[used].to(dtype) for b in (weights.w13_bias, weights.w2_bias))
    activated = small_batch_gated(on_the_way(rows.x), w13, few, activation=activation, bias=b13)
    return small_batch_down(on_the_way(activated), w2, few, rows.topk_weights, bias=b2).double()

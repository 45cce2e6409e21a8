"""What experts of the standard format ask of a call, with the same words. Needs no Triton, as a CPU has none."""

import torch

from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy


def standard(rows: Rows, *, experts: str) -> StandardRows:
    """The rows, if they are in the standard format.

    Raises:
        UnsupportedError: they are not.
    """
    if not isinstance(rows, StandardRows):
        raise UnsupportedError(
            f"the batched format in the {experts} experts", instead="choose an all-to-all of the standard format"
        )
    return rows


def require_weighting_by_experts(by: WeightAndReduceBy, *, experts: str) -> None:
    """Raises:
    UnsupportedError: the weighted sum was left to finalize.
    """
    if by is not WeightAndReduceBy.EXPERTS:
        raise UnsupportedError(
            f"leaving the weighted sum of the {experts} experts to finalize",
            instead="choose an all-to-all that leaves it to the experts",
        )


def require_shapes(x_RH: torch.Tensor, weights: ExpertWeights) -> None:
    """Check both weights and the rows against each other, for an activation with a gate.

    Raises:
        ShapeError: one does not fit; names it, what was wanted and what there is.
    """
    (E, H, F), R = weights.w2.shape, x_RH.shape[0]
    if weights.w13.shape != (E, 2 * F, H):
        raise ShapeError("w13", want=("E", "2F", "H"), values={"E": E, "2F": 2 * F, "H": H}, got=weights.w13.shape)
    if x_RH.shape[1] != H:
        raise ShapeError("x", want=("R", "H"), values={"R": R, "H": H}, got=x_RH.shape)

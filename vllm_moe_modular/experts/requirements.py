"""What experts ask of a call, with the same words. Needs no Triton, as a CPU has none."""

import torch

from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows, StandardRows
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


def batched(rows: Rows, *, experts: str, instead: str) -> BatchedRows:
    """The rows, if they are in the batched format.

    Args:
        instead: the experts to use where they are not.

    Raises:
        UnsupportedError: they are not.
    """
    if not isinstance(rows, BatchedRows):
        raise UnsupportedError(f"the standard format in the {experts} experts", instead=f"use the {instead} experts")
    return rows


def require_weighting_by_finalize(by: WeightAndReduceBy, *, experts: str) -> None:
    """Raises:
    UnsupportedError: the weighted sum was left to the experts.
    """
    if by is not WeightAndReduceBy.FINALIZE:
        raise UnsupportedError(
            f"leaving the weighted sum to the {experts} experts",
            instead="choose an all-to-all that weights in finalize",
        )


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


def require_batched_shapes(x_ECH: torch.Tensor, weights: ExpertWeights) -> None:
    """`require_shapes` for the batched format.

    Raises:
        ShapeError: one does not fit; names it, what was wanted and what there is.
    """
    E, H, F = weights.w2.shape
    if weights.w13.shape != (E, 2 * F, H):
        raise ShapeError("w13", want=("E", "2F", "H"), values={"E": E, "2F": 2 * F, "H": H}, got=weights.w13.shape)
    if x_ECH.shape[0] != E or x_ECH.shape[2] != H:
        values = {"E": E, "C": x_ECH.shape[1], "H": H}
        raise ShapeError("x", want=("E", "C", "H"), values=values, got=x_ECH.shape)


def require_fp8_together(rows: Rows, weights: ExpertWeights, where: str) -> None:
    """Check that fp8 GEMMs have both operands, for experts that would quantise the rows themselves.

    Raises:
        UnsupportedError: rows in fp8 with weights that are not; weights in fp8 in a layer of float32.
    """
    if weights.w13_scale is None and rows.x_scale is not None:
        raise UnsupportedError(
            f"rows in fp8 with unquantised weights in {where}",
            instead="choose an all-to-all that sends the rows as they are",
        )
    if weights.w13_scale is not None and rows.dtype == torch.float32:
        raise UnsupportedError(
            f"fp8 weights with rows in float32 in {where}",
            instead="serve with --dtype bfloat16, or use the torch experts",
        )

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


_OUT_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_routing(rows: StandardRows, where: str) -> None:
    """Check that every row has its ids and weights, and that the result has a dtype of activations.

    Args:
        where: who is asking, for the message: "the triton experts".

    Raises:
        ShapeError: ids or weights are of other rows; names them, what was wanted and what there is.
        UnsupportedError: the result in another dtype.
    """
    R, ids, topk_weights = rows.x.shape[0], rows.topk_ids, rows.topk_weights
    if ids.dim() != 2 or ids.shape[0] != R:
        values = {"R": R, "K": ids.shape[-1] if ids.dim() else 1}
        raise ShapeError(f"topk_ids in {where}", want=("R", "K"), values=values, got=ids.shape)
    if topk_weights.shape != ids.shape:
        values = {"R": R, "K": ids.shape[1]}
        raise ShapeError(f"topk_weights in {where}", want=("R", "K"), values=values, got=topk_weights.shape)
    _require_out_dtype(rows, where)


def _require_out_dtype(rows: Rows, where: str) -> None:
    if rows.out_dtype not in _OUT_DTYPES:
        raise UnsupportedError(
            f"rows with out_dtype {rows.out_dtype} in {where}",
            instead="pass the dtype of the layer's activations: float32, bfloat16, float16 or float64",
        )


def require_shapes(rows: StandardRows, weights: ExpertWeights, where: str) -> None:
    """Check both weights and the rows against each other, for an activation with a gate; see `require_routing`.

    Raises:
        ShapeError: one does not fit; names it, what was wanted and what there is.
        UnsupportedError: the result in a dtype that is none of activations.
    """
    (E, H, F), x_RH = weights.w2.shape, rows.x
    R = x_RH.shape[0]
    if weights.w13.shape != (E, 2 * F, H):
        raise ShapeError("w13", want=("E", "2F", "H"), values={"E": E, "2F": 2 * F, "H": H}, got=weights.w13.shape)
    if x_RH.shape[1] != H:
        raise ShapeError("x", want=("R", "H"), values={"R": R, "H": H}, got=x_RH.shape)
    require_routing(rows, where)


def require_batched_shapes(rows: BatchedRows, weights: ExpertWeights, where: str) -> None:
    """`require_shapes` for the batched format.

    Raises:
        ShapeError: one does not fit; names it, what was wanted and what there is.
        UnsupportedError: expert_num_tokens not in int32; the result in a dtype that is none of activations.
    """
    (E, H, F), x_ECH, counts_E = weights.w2.shape, rows.x, rows.expert_num_tokens
    if weights.w13.shape != (E, 2 * F, H):
        raise ShapeError("w13", want=("E", "2F", "H"), values={"E": E, "2F": 2 * F, "H": H}, got=weights.w13.shape)
    if x_ECH.shape[0] != E or x_ECH.shape[2] != H:
        values = {"E": E, "C": x_ECH.shape[1], "H": H}
        raise ShapeError("x", want=("E", "C", "H"), values=values, got=x_ECH.shape)
    if counts_E.shape != (E,):
        raise ShapeError(f"expert_num_tokens in {where}", want=("E",), values={"E": E}, got=counts_E.shape)
    if counts_E.dtype != torch.int32:
        raise UnsupportedError(f"expert_num_tokens in {counts_E.dtype} in {where}", instead="pass int32")
    _require_out_dtype(rows, where)


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

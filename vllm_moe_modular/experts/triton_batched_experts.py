"""Unquantised experts of the batched format in Triton: three launches, whose time follows the real rows.

    blocks_of_batch, grouped_gemm_gated, grouped_gemm_down

Letters: E local experts, C capacity per expert, S = E * C positions, H hidden, F expert intermediate.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import ShapeError, UnsupportedError
from vllm_moe_modular.experts.gated import gated
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.kernels.gemm_tiles import GemmTiles, choose_tiles
from vllm_moe_modular.kernels.grouped_gemm_down import grouped_gemm_down
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.kernels.launch import has_dependent_launch, shared_memory_bytes, takes_descriptor
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec

_FILLED = 4
"""The host does not know how many rows are real: tiles are chosen for one in so many."""


class TritonBatchedExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: the counts are read on the device.

    Args:
        activation: between the two GEMMs; a gated one.
        tiles: for the grouped GEMMs; None: chosen by the shape of each call.

    Raises:
        UnsupportedError: the activation has no gate.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.BATCHED
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.FINALIZE})

    def __init__(self, activation: Activation, *, tiles: GemmTiles | None = None) -> None:
        self._activation = gated(activation, experts="triton_batched")
        self._tiles = tiles

    @classmethod
    def build(cls, context: BuildContext) -> "TritonBatchedExperts":
        """For one layer."""
        return cls(context.require_activation())

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:
        """The activated rows, the result, blocks."""
        E, C, H = _batched(rows).x.shape
        F = weights.w2.shape[2]
        ints = batch_scratch_ints(E, C, self._tiles_for(_batched(rows), weights).block_rows)
        dtype = _batched(rows).x.dtype
        return (BufferSpec((E * C, F), dtype), BufferSpec((E, C, H), dtype), BufferSpec((ints,), torch.int32))

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,  # noqa: ARG002 - whoever dispatched has applied them
        out_RH: torch.Tensor | None = None,  # noqa: ARG002 - only where the experts weight
    ) -> torch.Tensor:
        """See `PermuteExpertsUnpermute.apply`. [E, C, H]; what lies behind an expert's rows is uninitialised.

        Raises:
            UnsupportedError: the weighted sum was left to the experts; the rows are not batched; the weights are
                quantised, not contiguous, or of another dtype than the rows.
            ShapeError: the weights are not of the rows' sizes, or not of each other's.
        """
        if weight_and_reduce_by is not WeightAndReduceBy.FINALIZE:
            raise UnsupportedError(
                "leaving the weighted sum to the triton_batched experts",
                instead="choose an all-to-all that weights in finalize",
            )
        rows = _batched(rows)
        _require_fitting(rows, weights)
        (E, C, H), (activated_SF, y_ECH, ints) = rows.x.shape, workspace
        if C == 0:
            return y_ECH
        tiles = self._tiles_for(rows, weights)
        pdl = has_dependent_launch(rows.x.device)
        x_SH = rows.x.contiguous().view(E * C, H)
        blocks = blocks_of_batch(rows.expert_num_tokens.contiguous(), C, tiles.block_rows, scratch=ints, pdl=pdl)
        grouped_gemm_gated(
            x_SH, weights.w13, blocks, out_SF=activated_SF, top_k=1, activation=self._activation,
            bias=weights.w13_bias, block_rows=tiles.block_rows, tile=tiles.gated, gathered=takes_descriptor(x_SH),
            pdl=pdl,
        )  # fmt: skip
        grouped_gemm_down(
            activated_SF, weights.w2, blocks, out_SH=y_ECH.view(E * C, H), bias=weights.w2_bias,
            block_rows=tiles.block_rows, tile=tiles.down, pdl=pdl,
        )  # fmt: skip
        return y_ECH

    def _tiles_for(self, rows: BatchedRows, weights: ExpertWeights) -> GemmTiles:
        E, C, H = rows.x.shape
        return self._tiles or choose_tiles(
            slots=max(1, E * C // _FILLED),
            num_experts=E,
            hidden=H,
            intermediate=weights.w2.shape[2],
            itemsize=rows.x.element_size(),
            shared_memory_bytes=shared_memory_bytes(rows.x.device),
        )


def _batched(rows: Rows) -> BatchedRows:
    if not isinstance(rows, BatchedRows):
        raise UnsupportedError("the standard format in the triton_batched experts", instead="use the triton experts")
    return rows


def _require_fitting(rows: BatchedRows, weights: ExpertWeights) -> None:
    E, H, F = weights.w2.shape
    if weights.w13.shape != (E, 2 * F, H):
        raise ShapeError("w13", want=("E", "2F", "H"), values={"E": E, "2F": 2 * F, "H": H}, got=weights.w13.shape)
    if rows.x.shape[0] != E or rows.x.shape[2] != H:
        values = {"E": E, "C": rows.x.shape[1], "H": H}
        raise ShapeError("x", want=("E", "C", "H"), values=values, got=rows.x.shape)
    for name, w in (("w13", weights.w13), ("w2", weights.w2)):
        if w.dtype != rows.x.dtype:
            raise UnsupportedError(
                f"{name} in {w.dtype} with rows in {rows.x.dtype} in the triton_batched experts",
                instead="serve an unquantised checkpoint with --dtype set to its own, or use the standard format",
            )
        if not w.is_contiguous():
            raise UnsupportedError(
                f"{name} with strides {w.stride()} in the triton_batched experts", instead="use the standard format"
            )

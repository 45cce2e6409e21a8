"""Experts of the batched format in Triton: three launches, or four, whose time follows the real rows.

    blocks_of_batch, grouped_gemm_gated, grouped_gemm_down
    in fp8: blocks_of_batch, quantize_batch (unless the rows come in fp8), grouped_gemm_gated_fp8, grouped_gemm_down_fp8

With weights in fp8 rows and activated rows are quantised too, per row and 128 columns.

Letters: E local experts, C capacity per expert, S = E * C positions, H hidden, F expert intermediate.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.gated import gated, require_whole_blocks
from vllm_moe_modular.experts.requirements import (
    batched,
    require_batched_shapes,
    require_fp8_together,
    require_weighting_by_finalize,
)
from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.kernels.gemm_tiles import GemmTiles, choose_tiles
from vllm_moe_modular.kernels.grouped_gemm_down import grouped_gemm_down
from vllm_moe_modular.kernels.grouped_gemm_down_fp8 import grouped_gemm_down_fp8
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.kernels.grouped_gemm_gated_fp8 import grouped_gemm_gated_fp8
from vllm_moe_modular.kernels.launch import (
    can_specialize,
    has_dependent_launch,
    shared_memory_bytes,
    takes_descriptor,
)
from vllm_moe_modular.kernels.quantize_batch import quantize_batch
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import require_row_scales, require_scales
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec

_WHERE = "the triton_batched experts"

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
        """The activated rows, the result, blocks.

        The rows in fp8 lie where the result comes, which is written when they are used up.
        """
        rows = _batched(rows)
        (E, C, H), F, dtype = rows.x.shape, weights.w2.shape[2], rows.dtype
        activated, y = E * C * F, E * C * H
        if weights.w13_scale is not None:
            activated = -(-Fp8Rows.nbytes(E * C, F) // dtype.itemsize)
            y = max(y, -(-Fp8Rows.nbytes(E * C, H) // dtype.itemsize))
        ints = batch_scratch_ints(E, C, self._tiles_for(rows, weights).block_rows)
        return (BufferSpec((activated,), dtype), BufferSpec((y,), dtype), BufferSpec((ints,), torch.int32))

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
            UnsupportedError: the weighted sum was left to the experts; the rows are not batched; the weights are not
                contiguous, or neither of the activations' dtype nor float8_e4m3fn with scales; blocks with scales hold
                gates and ups; rows in fp8 with weights that are not.
            ShapeError: the weights are not of the rows' sizes, or not of each other's; scales do not fit.
        """
        require_weighting_by_finalize(weight_and_reduce_by, experts="triton_batched")
        rows = _batched(rows)
        _require_fitting(rows, weights)
        if weights.w13_scale is not None and weights.w13_scale.dim() == 3:
            require_whole_blocks(weights, self._activation, _WHERE)
        (E, C, H), (pool, y_pool, ints) = rows.x.shape, workspace
        y_ECH = y_pool[: E * C * H].view(E, C, H)
        if E * C == 0:
            return y_ECH
        tiles = self._tiles_for(rows, weights)
        pdl = has_dependent_launch(rows.x.device)
        blocks = blocks_of_batch(rows.expert_num_tokens.contiguous(), C, tiles.block_rows, scratch=ints, pdl=pdl)
        if weights.w13_scale is None or weights.w2_scale is None:
            self._run(rows.x.contiguous(), weights, blocks, tiles, activated=pool, y_ECH=y_ECH, pdl=pdl)
            return y_ECH
        x = _in_fp8(rows, blocks, tiles.block_rows, scratch=y_pool, pdl=pdl)
        activated = Fp8Rows.within(pool, E * C, weights.w2.shape[2])
        grouped_gemm_gated_fp8(
            x, weights.w13, weights.w13_scale, blocks, out=activated, top_k=1, activation=self._activation,
            bias=weights.w13_bias, block_rows=tiles.block_rows, tile=tiles.gated, gathered=takes_descriptor(x.values),
            pdl=pdl,
        )  # fmt: skip
        grouped_gemm_down_fp8(
            activated, weights.w2, weights.w2_scale, blocks, out_SH=y_ECH.view(E * C, H), bias=weights.w2_bias,
            block_rows=tiles.block_rows, tile=tiles.down, pdl=pdl,
        )  # fmt: skip
        return y_ECH

    def _run(
        self,
        x_ECH: torch.Tensor,
        weights: ExpertWeights,
        blocks: AlignedRows,
        tiles: GemmTiles,
        *,
        activated: torch.Tensor,
        y_ECH: torch.Tensor,
        pdl: bool,
    ) -> None:
        """Unquantised."""
        (E, C, H), F = x_ECH.shape, weights.w2.shape[2]
        x_SH, activated_SF = x_ECH.view(E * C, H), activated[: E * C * F].view(E * C, F)
        grouped_gemm_gated(
            x_SH, weights.w13, blocks, out_SF=activated_SF, top_k=1, activation=self._activation,
            bias=weights.w13_bias, block_rows=tiles.block_rows, tile=tiles.gated, gathered=takes_descriptor(x_SH),
            pdl=pdl,
        )  # fmt: skip
        grouped_gemm_down(
            activated_SF, weights.w2, blocks, out_SH=y_ECH.view(E * C, H), bias=weights.w2_bias,
            block_rows=tiles.block_rows, tile=tiles.down, pdl=pdl,
        )  # fmt: skip

    def _tiles_for(self, rows: BatchedRows, weights: ExpertWeights) -> GemmTiles:
        E, C, H = rows.x.shape
        return self._tiles or choose_tiles(
            slots=max(1, E * C // _FILLED),
            num_experts=E,
            hidden=H,
            intermediate=weights.w2.shape[2],
            itemsize=weights.w13.element_size(),
            shared_memory_bytes=shared_memory_bytes(rows.x.device),
            specialize=can_specialize(weights.w13, weights.w2, interleaved=self._activation.interleaved),
        )


def _batched(rows: Rows) -> BatchedRows:
    return batched(rows, experts="triton_batched", instead="triton")


def _in_fp8(
    rows: BatchedRows, blocks: AlignedRows, block_rows: int, *, scratch: torch.Tensor, pdl: bool
) -> Fp8Rows:  # fmt: skip
    """The real rows as the first GEMM takes them, [E * C, H]; as they came if they are in fp8, else in `scratch`."""
    E, C, H = rows.x.shape
    if rows.x_scale is not None:
        return Fp8Rows(rows.x.view(E * C, H), rows.x_scale)
    x = Fp8Rows.within(scratch, E * C, H)
    quantize_batch(
        rows.x.contiguous(), blocks, out_EDH=x.values.view(E, C, H), scales_EDG=x.scales.view(E, C, -1),
        block_rows=block_rows, pdl=pdl,
    )  # fmt: skip
    return x


def _require_fitting(rows: BatchedRows, weights: ExpertWeights) -> None:
    require_batched_shapes(rows, weights, _WHERE)
    require_scales(weights, _WHERE)
    require_row_scales(rows, _WHERE)
    require_fp8_together(rows, weights, _WHERE)
    for name, w in (("w13", weights.w13), ("w2", weights.w2)):
        if w.dtype not in (rows.dtype, torch.float8_e4m3fn):
            raise UnsupportedError(
                f"{name} in {w.dtype} with rows in {rows.dtype} in {_WHERE}",
                instead="serve with --dtype set to that of the checkpoint, or use the standard format",
            )
        if not w.is_contiguous():
            raise UnsupportedError(f"{name} with strides {w.stride()} in {_WHERE}", instead="use the standard format")

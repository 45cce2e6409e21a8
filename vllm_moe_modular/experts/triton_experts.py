"""Experts of the standard format in Triton: four launches for a batch, two for one or a few rows.

    a batch: align_rows, grouped_gemm_gated, grouped_gemm_down, weighted_topk_sum
    in fp8: align_rows, quantize_fp8, grouped_gemm_gated_fp8, grouped_gemm_down_fp8, weighted_topk_sum
    few rows: small_batch_gated, small_batch_down

With weights in fp8 a batch's rows and activated rows are quantised too, per row and 128 columns; a few rows stay as
they are, for their time is that of reading the weights. Rows that come in fp8 are not quantised again.

Letters: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E local experts.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.gated import gated, require_whole_blocks
from vllm_moe_modular.experts.requirements import (
    require_fp8_together,
    require_shapes,
    require_weighting_by_experts,
    standard,
)
from vllm_moe_modular.kernels.align_rows import align_rows, scratch_ints
from vllm_moe_modular.kernels.gather_rows import gather_rows
from vllm_moe_modular.kernels.gemm_tiles import GemmTiles, choose_tiles
from vllm_moe_modular.kernels.grouped_gemm_down import grouped_gemm_down
from vllm_moe_modular.kernels.grouped_gemm_down_fp8 import grouped_gemm_down_fp8
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.kernels.grouped_gemm_gated_fp8 import grouped_gemm_gated_fp8
from vllm_moe_modular.kernels.launch import can_specialize, has_dependent_launch, shared_memory_bytes, takes_descriptor
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from vllm_moe_modular.kernels.small_batch_down import small_batch_down
from vllm_moe_modular.kernels.small_batch_gated import small_batch_gated
from vllm_moe_modular.kernels.tuned_tables import NO_TABLE, TunedCell, TunedTable, tuned_shape, tuned_table
from vllm_moe_modular.kernels.weighted_topk_sum import weighted_topk_sum
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import require_row_scales, require_scales
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec


def is_small_batch(rows: int, top_k: int, num_experts: int) -> bool:
    """Whether to go slot by slot: so few slots that hardly two of them share an expert's weights."""
    return rows == 1 or (rows == 2 and 8 * top_k <= num_experts)


class TritonExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: nothing is read back to the host.

    Args:
        activation: between the two GEMMs; a gated one.
        tiles: for the grouped GEMMs; None: chosen by the shape of each call.
        tuned: what is asked before the choice.
        slot_by_slot: whether a call is a small batch; None: chosen by the shape of each call.

    Raises:
        UnsupportedError: the activation has no gate.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.EXPERTS})
    compiles_by_rows: ClassVar[bool] = True

    def __init__(
        self,
        activation: Activation,
        *,
        tiles: GemmTiles | None = None,
        tuned: TunedTable = NO_TABLE,
        slot_by_slot: bool | None = None,
    ) -> None:
        self._activation = gated(activation, experts="triton")
        self._tiles = tiles
        self._tuned = tuned
        self._slot_by_slot = slot_by_slot

    @classmethod
    def build(cls, context: BuildContext) -> "TritonExperts":
        """For one layer."""
        return cls(context.require_activation(), tuned=tuned_table(context.device, context.tuned))

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:
        """The activated rows (where the result goes once they are used up), the expert rows, indices.

        Slots are ranked, and rows in fp8 lie, where the expert rows come, which are written when those are used up.
        """
        rows = standard(rows, experts="triton")
        R, K = rows.topk_ids.shape
        E, H, F = weights.w2.shape
        if self._is_small_batch(rows, weights):
            return (BufferSpec((R * K, F), rows.dtype), BufferSpec((R, H), rows.dtype))
        activated, expert_rows = R * K * F, R * K * H
        if weights.w13_scale is not None:
            itemsize = rows.dtype.itemsize
            activated = -(-Fp8Rows.nbytes(R * K, F) // itemsize)
            expert_rows = max(expert_rows, -(-Fp8Rows.nbytes(R * K, H) // itemsize))
        return (
            BufferSpec((max(activated, R * H),), rows.dtype),
            BufferSpec((expert_rows,), rows.dtype),
            BufferSpec((scratch_ints(R * K, E, self._tiles_for(rows, weights).block_rows),), torch.int32),
        )

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
        """See `PermuteExpertsUnpermute.apply`; weights and sums over top-k itself.

        Raises:
            UnsupportedError: the weighted sum was left to finalize; the weights are not contiguous, or neither of the
                activations' dtype nor float8_e4m3fn with scales; blocks with scales hold gates and ups; rows in fp8
                with weights that are not.
            ShapeError: the weights are not of the rows' hidden size, or not of each other's; scales do not fit them or
                the rows.
        """
        rows = standard(rows, experts="triton")
        require_weighting_by_experts(weight_and_reduce_by, experts="triton")
        R, (E, H, _) = rows.topk_ids.shape[0], weights.w2.shape
        _require_fitting(rows, weights)
        if weights.w13_scale is not None and weights.w13_scale.dim() == 3:
            require_whole_blocks(weights, self._activation, "the triton experts")
        if R * E == 0:
            return rows.x.new_zeros((R, H), dtype=rows.dtype)
        batch = self._batch if weights.w13_scale is None else self._batch_fp8
        run = self._small_batch if self._is_small_batch(rows, weights) else batch
        return run(rows, weights, workspace, router_weight_on_input, out_RH)

    def _small_batch(
        self,
        rows: StandardRows,
        weights: ExpertWeights,
        workspace: Sequence[torch.Tensor],
        weight_on_input: bool,
        out_RH: torch.Tensor | None,
    ) -> torch.Tensor:
        activated_SF, scratch_RH = workspace
        out_RH = scratch_RH if out_RH is None else out_RH
        pdl = has_dependent_launch(rows.x.device)
        ids, topk_weights = rows.topk_ids.contiguous(), rows.topk_weights.contiguous()
        small_batch_gated(
            rows.x, weights.w13, ids, out_SF=activated_SF, activation=self._activation,
            x_scale_RG=rows.x_scale, scale=weights.w13_scale, bias=weights.w13_bias,
            topk_weights_RK=topk_weights if weight_on_input else None, pdl=pdl,
        )  # fmt: skip
        small_batch_down(
            activated_SF, weights.w2, ids, None if weight_on_input else topk_weights,
            out_RH=out_RH, scale=weights.w2_scale, bias=weights.w2_bias, pdl=pdl,
        )  # fmt: skip
        return out_RH

    def _batch(
        self,
        rows: StandardRows,
        weights: ExpertWeights,
        workspace: Sequence[torch.Tensor],
        weight_on_input: bool,
        out_RH: torch.Tensor | None,
    ) -> torch.Tensor:
        R, K = rows.topk_ids.shape
        E, H, F = weights.w2.shape
        pool, y_pool, ints = workspace
        y_SH = y_pool.view(R * K, H)
        activated_SF = pool[: R * K * F].view(R * K, F)
        if out_RH is None:  # then over the activated rows, which the down GEMM has used up by then
            out_RH = pool[: R * H].view(R, H)
        tiles = self._tiles_for(rows, weights)
        pdl = has_dependent_launch(rows.x.device)
        ids, topk_weights = rows.topk_ids.contiguous(), rows.topk_weights.contiguous()
        aligned = align_rows(ids, E, tiles.block_rows, scratch=ints, ranks_S=_ints_of(y_pool, R * K), pdl=pdl)
        gather = tiles.gather_first and takes_descriptor(y_SH)
        if gather:
            gather_rows(rows.x, aligned, top_k=K, out_SH=y_SH, pdl=pdl)
        grouped_gemm_gated(
            y_SH if gather else rows.x, weights.w13, aligned, out_SF=activated_SF, top_k=K, activation=self._activation,
            bias=weights.w13_bias, topk_weights_RK=topk_weights if weight_on_input else None,
            block_rows=tiles.block_rows, tile=tiles.gated, gathered=gather, pdl=pdl,
        )  # fmt: skip
        grouped_gemm_down(
            activated_SF, weights.w2, aligned, out_SH=y_SH, bias=weights.w2_bias,
            block_rows=tiles.block_rows, tile=tiles.down, pdl=pdl,
        )  # fmt: skip
        weighted_topk_sum(
            y_SH, ids, None if weight_on_input else topk_weights, num_experts=E, out_RH=out_RH, pdl=pdl
        )  # fmt: skip
        return out_RH

    def _batch_fp8(
        self,
        rows: StandardRows,
        weights: ExpertWeights,
        workspace: Sequence[torch.Tensor],
        weight_on_input: bool,
        out_RH: torch.Tensor | None,
    ) -> torch.Tensor:
        assert weights.w13_scale is not None, "the fp8 path without w13_scale"
        assert weights.w2_scale is not None, "the fp8 path without w2_scale"
        R, K = rows.topk_ids.shape
        E, H, F = weights.w2.shape
        pool, y_pool, ints = workspace
        y_SH = y_pool[: R * K * H].view(R * K, H)
        activated = Fp8Rows.within(pool, R * K, F)
        if out_RH is None:  # then over the activated rows, which the down GEMM has used up by then
            out_RH = pool[: R * H].view(R, H)
        tiles = self._tiles_for(rows, weights)
        pdl = has_dependent_launch(rows.x.device)
        ids, topk_weights = rows.topk_ids.contiguous(), rows.topk_weights.contiguous()
        aligned = align_rows(ids, E, tiles.block_rows, scratch=ints, ranks_S=_ints_of(y_pool, R * K), pdl=pdl)
        x = Fp8Rows.within(y_pool, R * K, H)  # used up when the down GEMM writes its rows there
        gather = tiles.gather_first and takes_descriptor(x.values)
        if rows.x_scale is None:
            x = x if gather else Fp8Rows.within(y_pool, R, H)
            quantize_fp8(rows.x, out=x, rows=aligned if gather else None, top_k=K, pdl=pdl)
        elif gather:
            gather_rows(rows.x, aligned, top_k=K, out_SH=x.values, pdl=pdl)
            gather_rows(rows.x_scale.contiguous(), aligned, top_k=K, out_SH=x.scales, pdl=pdl)
        else:
            x = Fp8Rows(rows.x, rows.x_scale)
        grouped_gemm_gated_fp8(
            x, weights.w13, weights.w13_scale, aligned, out=activated, top_k=K, activation=self._activation,
            bias=weights.w13_bias, topk_weights_RK=topk_weights if weight_on_input else None,
            block_rows=tiles.block_rows, tile=tiles.gated, gathered=gather, pdl=pdl,
        )  # fmt: skip
        grouped_gemm_down_fp8(
            activated, weights.w2, weights.w2_scale, aligned, out_SH=y_SH, bias=weights.w2_bias,
            block_rows=tiles.block_rows, tile=tiles.down, pdl=pdl,
        )  # fmt: skip
        weighted_topk_sum(
            y_SH, ids, None if weight_on_input else topk_weights, num_experts=E, out_RH=out_RH, pdl=pdl
        )  # fmt: skip
        return out_RH

    def _tuned_cell(self, rows: StandardRows, weights: ExpertWeights) -> TunedCell | None:
        R, K = rows.topk_ids.shape
        return self._tuned.cell(tuned_shape(weights, K), R) if self._tuned.shapes else None

    def _is_small_batch(self, rows: StandardRows, weights: ExpertWeights) -> bool:
        if self._slot_by_slot is not None:
            return self._slot_by_slot
        R, K = rows.topk_ids.shape
        cell, untuned = self._tuned_cell(rows, weights), is_small_batch(R, K, len(weights.w2))
        return untuned if cell is None else cell.goes_slot_by_slot(R, untuned)

    def _tiles_for(self, rows: StandardRows, weights: ExpertWeights) -> GemmTiles:
        if self._tiles is not None:
            return self._tiles
        E, H, F = weights.w2.shape
        cell = self._tuned_cell(rows, weights)
        return choose_tiles(
            slots=rows.topk_ids.numel(),
            num_experts=E,
            hidden=H,
            intermediate=F,
            itemsize=weights.w13.element_size(),
            shared_memory_bytes=shared_memory_bytes(rows.x.device),
            specialize=can_specialize(weights.w13, weights.w2, interleaved=self._activation.interleaved),
            tuned=None if cell is None else cell.tiles,
        )


def _ints_of(pool: torch.Tensor, count: int) -> torch.Tensor | None:
    """So many int32 in the first bytes of the pool, if it has them: expert rows of one column in 16 bits have not."""
    return pool.view(torch.int32)[:count] if pool.nbytes >= 4 * count and pool.nbytes % 4 == 0 else None


def _require_fitting(rows: StandardRows, weights: ExpertWeights) -> None:
    require_shapes(rows, weights, "the triton experts")
    require_scales(weights, "the triton experts")
    require_row_scales(rows, "the triton experts")
    require_fp8_together(rows, weights, "the triton experts")
    for name, w in (("w13", weights.w13), ("w2", weights.w2)):
        if w.dtype not in (rows.dtype, torch.float8_e4m3fn):
            raise UnsupportedError(
                f"{name} in {w.dtype} with rows in {rows.dtype} in the triton experts",
                instead="serve with --dtype set to that of the checkpoint, or use the torch experts",
            )
        if not w.is_contiguous():
            raise UnsupportedError(
                f"{name} with strides {w.stride()} in the triton experts", instead="use the torch experts"
            )

"""Experts of the standard format on DeepGEMM's grouped GEMMs, bf16 or fp8 in blocks of 128 x 128: seven launches.

    bf16: place_rows (two), scatter_rows, GEMM, activate_rows, GEMM, weighted_topk_sum
    fp8:  the same, rows and activations quantised on the way: scatter_quantize_rows, activate_quantize_rows

Rows that come in fp8 are not quantised again: scatter_quantize_rows copies them.

The rows lie expert after expert in P rows, a number that the host can know; every expert begins at a block of the GEMM.
What lies between is skipped where it fills a block, and computed from garbage and never read where it does not.

Letters: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E local experts, P rows of the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.experts.deep_gemm_library import DeepGemm, compile_up_to, expected_rows, load_deep_gemm
from vllm_moe_modular.experts.deep_gemm_requirements import require_deep_gemm
from vllm_moe_modular.experts.gated import gated
from vllm_moe_modular.experts.requirements import require_shapes, require_weighting_by_experts, standard
from vllm_moe_modular.kernels.activate_quantize_rows import activate_quantize_rows
from vllm_moe_modular.kernels.activate_rows import activate_rows
from vllm_moe_modular.kernels.launch import has_dependent_launch
from vllm_moe_modular.kernels.place_rows import max_placed_rows, place_rows, scratch_ints
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.kernels.scatter_quantize_rows import scatter_quantize_rows
from vllm_moe_modular.kernels.scatter_rows import scatter_rows
from vllm_moe_modular.kernels.weighted_topk_sum import weighted_topk_sum
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import require_row_scales
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec

_WHERE = "the deep_gemm experts"


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The workspace of one call. What two launches do not need at the same time lies in one place."""

    x: torch.Tensor  # [P, H]
    gate_up: torch.Tensor  # [P, 2F]
    activated: torch.Tensor  # [P, F], over x
    y: torch.Tensor  # [P, H], over gate_up
    out: torch.Tensor  # [R, H], over activated
    x_scales: torch.Tensor | None  # [H / 128, P]
    activated_scales: torch.Tensor | None  # [F / 128, P], over x_scales
    ints: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one call."""

    R: int
    K: int
    E: int
    H: int
    F: int
    P: int
    dtype: torch.dtype  # of what the GEMMs multiply

    @property
    def expected_rows(self) -> int:
        return expected_rows(self.R * self.K, self.E)

    def specs(self) -> tuple[BufferSpec, ...]:
        """What the GEMMs read, what they write, scales: bytes; indices."""
        widest = self.P * max(self.H, self.F)
        read = max(widest * self.dtype.itemsize, self.R * self.H * 2)
        written = self.P * max(2 * self.F, self.H) * 2
        scales = 0 if self.dtype == torch.bfloat16 else widest // GROUP * 4
        return (
            *(BufferSpec((size,), torch.uint8) for size in (read, written, scales)),
            BufferSpec((scratch_ints(self.R * self.K, self.E),), torch.int32),
        )

    def carve(self, workspace: Sequence[torch.Tensor]) -> _Buffers:
        read, written, scales, ints = workspace
        quantized = self.dtype != torch.bfloat16
        return _Buffers(
            x=_part(read, self.P, self.H, dtype=self.dtype),
            gate_up=_part(written, self.P, 2 * self.F),
            activated=_part(read, self.P, self.F, dtype=self.dtype),
            y=_part(written, self.P, self.H),
            out=_part(read, self.R, self.H),
            x_scales=_part(scales, self.H // GROUP, self.P, dtype=torch.float32) if quantized else None,
            activated_scales=_part(scales, self.F // GROUP, self.P, dtype=torch.float32) if quantized else None,
            ints=ints,
        )


class DeepGemmExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: nothing is read back to the host.

    DeepGEMM compiles a kernel where it first needs one, which takes seconds. The first call for a shape of weights
    therefore runs every kernel that it or a smaller one needs, over no rows: in vLLM that is the profile run, which is
    the largest step.

    Args:
        activation: between the two GEMMs; a gated one.
        library: None: the installed one.

    Raises:
        UnsupportedError: the activation has no gate; DeepGEMM is not there, or lacks its compiler.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.EXPERTS})
    compiles_by_rows: ClassVar[bool] = True

    def __init__(self, activation: Activation, *, library: DeepGemm | None = None) -> None:
        self._activation = gated(activation, experts="deep_gemm")
        self._library = library or load_deep_gemm()
        self._compiled: dict[tuple[object, ...], int] = {}  # by shape of the weights: rows of an expert up to which

    @classmethod
    def build(cls, context: BuildContext) -> "DeepGemmExperts":
        """For one layer."""
        return cls(context.require_activation())

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:
        """Two buffers that rows and activations, and both GEMMs' results, take in turns; scales and indices."""
        return _sizes(standard(rows, experts="deep_gemm"), weights, self._library.alignment).specs()

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
            UnsupportedError: the weighted sum was left to finalize; activations that are not bfloat16; rows in fp8 with
                weights that are not; weights that DeepGEMM does not take: a dtype, a size, strides, biases, scales per
                channel.
            ShapeError: the weights are not of the rows' hidden size, or not of each other's; scales do not fit the
                rows.
        """
        rows = standard(rows, experts="deep_gemm")
        require_weighting_by_experts(weight_and_reduce_by, experts="deep_gemm")
        _require_fitting(rows, weights)
        R, (E, H, _) = rows.topk_ids.shape[0], weights.w2.shape
        if R * E == 0:
            return rows.x.new_zeros((R, H), dtype=rows.dtype)
        return self._run(rows, weights, workspace, router_weight_on_input, out_RH)

    def _run(
        self,
        rows: StandardRows,
        weights: ExpertWeights,
        workspace: Sequence[torch.Tensor],
        weight_on_input: bool,
        out_RH: torch.Tensor | None,
    ) -> torch.Tensor:
        sizes = _sizes(rows, weights, self._library.alignment)
        b = sizes.carve(workspace)
        gemm = self._library.grouped_gemm
        up = partial(
            gemm, b.x, weights.w13, out_PN=b.gate_up, scales=_pair(b.x_scales, weights.w13_scale)
        )  # fmt: skip
        down = partial(
            gemm, b.activated, weights.w2, out_PN=b.y, scales=_pair(b.activated_scales, weights.w2_scale)
        )  # fmt: skip

        def run_empty(no_rows: torch.Tensor, expected_rows: int) -> None:
            for run in (up, down):
                run(ends=no_rows, expected_rows=expected_rows)

        compile_up_to(
            self._compiled, (sizes.E, sizes.H, sizes.F, sizes.dtype), num_experts=sizes.E,
            expected_rows=sizes.expected_rows, device=rows.x.device, run=run_empty,
        )  # fmt: skip
        pdl = has_dependent_launch(rows.x.device)
        ids, topk_weights = rows.topk_ids.contiguous(), rows.topk_weights.contiguous()
        on_input, on_output = (topk_weights, None) if weight_on_input else (None, topk_weights)

        placed = place_rows(ids, sizes.E, self._library.alignment, scratch=b.ints, pdl=pdl)
        if b.x_scales is None:
            scatter_rows(rows.x, placed.positions, out_PH=b.x, pdl=pdl)
        else:
            scatter_quantize_rows(
                rows.x, placed.positions, out_PH=b.x, scales_GP=b.x_scales, x_scale_RG=rows.x_scale, pdl=pdl
            )  # fmt: skip
        up(ends=placed.ends, expected_rows=sizes.expected_rows)
        if b.activated_scales is None:
            activate_rows(
                b.gate_up, placed.positions, out_PF=b.activated,
                activation=self._activation, topk_weights=on_input, pdl=pdl,
            )  # fmt: skip
        else:
            activate_quantize_rows(
                b.gate_up, placed.positions, out_PF=b.activated, scales_GP=b.activated_scales,
                activation=self._activation, topk_weights=on_input, pdl=pdl,
            )  # fmt: skip
        down(ends=placed.ends, expected_rows=sizes.expected_rows)
        out_RH = b.out if out_RH is None else out_RH
        weighted_topk_sum(
            b.y, ids, on_output, num_experts=sizes.E, out_RH=out_RH, positions=placed.positions, pdl=pdl
        )  # fmt: skip
        return out_RH


def _part(buffer: torch.Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The first bytes of a buffer as a tensor."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _pair(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if a is None or b is None else (a, b)


def _sizes(rows: StandardRows, weights: ExpertWeights, alignment: int) -> _Sizes:
    R, K = rows.topk_ids.shape
    E, H, F = weights.w2.shape
    return _Sizes(R=R, K=K, E=E, H=H, F=F, P=max_placed_rows(R * K, E, alignment), dtype=weights.w2.dtype)


def _require_fitting(rows: StandardRows, weights: ExpertWeights) -> None:
    require_shapes(rows, weights, _WHERE)
    require_row_scales(rows, _WHERE)
    require_deep_gemm(rows, weights, _WHERE)

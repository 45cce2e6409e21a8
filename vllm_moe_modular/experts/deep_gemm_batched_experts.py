"""Experts of the batched format on DeepGEMM's masked grouped GEMM, fp8 in blocks of 128 x 128: four launches, or five.

    blocks_of_batch, quantize_batch (unless the rows come in fp8), GEMM, activate_quantize_batch, GEMM

A tile of a GEMM may reach behind an expert's real rows, so that every block has a multiple of `MASKED_ROWS` rows here.
Where the capacity is none, rows in fp8 are copied too, and the result once more, all of it.

Letters: E local experts, C capacity per expert, D the same rounded up, H hidden, F expert intermediate, G = H / 128,
J = F / 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.deep_gemm_library import (
    MASKED_ROWS,
    DeepGemm,
    compile_up_to,
    expected_rows,
    load_deep_gemm,
    masked_scales,
)
from vllm_moe_modular.experts.deep_gemm_requirements import require_deep_gemm
from vllm_moe_modular.experts.gated import gated
from vllm_moe_modular.experts.requirements import batched, require_batched_shapes, require_weighting_by_finalize
from vllm_moe_modular.kernels.activate_quantize_batch import activate_quantize_batch
from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.kernels.launch import has_dependent_launch
from vllm_moe_modular.kernels.quantize_batch import quantize_batch
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import require_row_scales
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec

_WHERE = "the deep_gemm_batched experts"

_FILLED = 4
"""The host does not know how many rows are real: kernels are chosen for one in so many."""

_BLOCK_ROWS = 16
"""Of the kernels that quantise."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The workspace of one call. What two launches do not need at the same time lies in one place."""

    x: torch.Tensor  # [E, D, H] fp8
    x_scales: torch.Tensor  # [E, D, G]
    gate_up: torch.Tensor  # [E, D, 2F]
    activated: torch.Tensor  # [E, D, F] fp8, over x
    activated_scales: torch.Tensor  # [E, D, J], over x_scales
    y: torch.Tensor  # [E, D, H], over gate_up
    out: torch.Tensor  # [E, C, H], over activated; y itself where D is C
    ints: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one call."""

    E: int
    C: int
    H: int
    F: int

    @property
    def D(self) -> int:  # noqa: N802 - a letter of the package
        return -(-self.C // MASKED_ROWS) * MASKED_ROWS

    @property
    def expected_rows(self) -> int:
        return expected_rows(max(1, self.E * self.C // _FILLED), self.E)

    def specs(self) -> tuple[BufferSpec, ...]:
        """What the GEMMs read, what they write: bytes; scales; indices."""
        rows, widest = self.E * self.D, max(self.H, self.F)
        read = rows * widest if self.D == self.C else max(rows * widest, self.E * self.C * self.H * 2)
        written = rows * max(2 * self.F, self.H) * 2
        return (
            BufferSpec((read,), torch.uint8),
            BufferSpec((written,), torch.uint8),
            BufferSpec((rows * (widest // GROUP),), torch.float32),
            BufferSpec((batch_scratch_ints(self.E, self.C, _BLOCK_ROWS),), torch.int32),
        )

    def carve(self, workspace: Sequence[torch.Tensor]) -> _Buffers:
        read, written, scales, ints = workspace
        E, C, D, H, F = self.E, self.C, self.D, self.H, self.F
        y = _part(written, E, D, H, dtype=torch.bfloat16)
        return _Buffers(
            x=_part(read, E, D, H, dtype=torch.float8_e4m3fn),
            x_scales=masked_scales(scales, E, D, H // GROUP),
            gate_up=_part(written, E, D, 2 * F, dtype=torch.bfloat16),
            activated=_part(read, E, D, F, dtype=torch.float8_e4m3fn),
            activated_scales=masked_scales(scales, E, D, F // GROUP),
            y=y,
            out=y if D == C else _part(read, E, C, H, dtype=torch.bfloat16),
            ints=ints,
        )


class DeepGemmBatchedExperts(PermuteExpertsUnpermute):
    """Runs in CUDA graphs at every size: the counts are read on the device.

    DeepGEMM compiles a kernel where it first needs one, which takes seconds: the first call for a shape of weights runs
    every kernel that it or one of a smaller capacity needs, over no rows.

    Args:
        activation: between the two GEMMs; a gated one.
        library: None: the installed one.

    Raises:
        UnsupportedError: the activation has no gate; DeepGEMM is not there, or lacks its compiler.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.BATCHED
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset({WeightAndReduceBy.FINALIZE})

    def __init__(self, activation: Activation, *, library: DeepGemm | None = None) -> None:
        self._activation = gated(activation, experts="deep_gemm_batched")
        self._library = library or load_deep_gemm()
        self._compiled: dict[tuple[object, ...], int] = {}  # by shape of the weights: rows of an expert up to which

    @classmethod
    def build(cls, context: BuildContext) -> "DeepGemmBatchedExperts":
        """For one layer."""
        return cls(context.require_activation())

    def workspace(self, rows: Rows, weights: ExpertWeights) -> Sequence[BufferSpec]:
        """Two buffers that rows and activations, and both GEMMs' results, take in turns; scales and indices."""
        return _sizes(_batched(rows), weights).specs()

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
            UnsupportedError: the weighted sum was left to the experts; the rows are not batched; activations that are
                not bfloat16; weights that are not in fp8, or that DeepGEMM does not take: a size, strides, biases,
                scales per channel.
            ShapeError: the weights are not of the rows' sizes, or not of each other's; scales do not fit the rows.
        """
        rows = _batched(rows)
        require_weighting_by_finalize(weight_and_reduce_by, experts="deep_gemm_batched")
        w13_scale, w2_scale = _require_fitting(rows, weights)
        sizes = _sizes(rows, weights)
        b = sizes.carve(workspace)
        if sizes.E * sizes.C == 0:
            return b.out
        pdl = has_dependent_launch(rows.x.device)
        gemm = self._library.masked_grouped_gemm

        def up(x: torch.Tensor, x_scales: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
            gemm(x, weights.w13, counts=counts, expected_rows=expected, out_EDN=b.gate_up, scales=(x_scales, w13_scale))

        def down(counts: torch.Tensor, expected: int) -> None:
            scales = b.activated_scales, w2_scale
            gemm(b.activated, weights.w2, counts=counts, expected_rows=expected, out_EDN=b.y, scales=scales)

        def run_empty(no_rows: torch.Tensor, expected: int) -> None:
            up(b.x, b.x_scales, no_rows, expected)
            down(no_rows, expected)

        compile_up_to(
            self._compiled, (sizes.E, sizes.H, sizes.F), num_experts=sizes.E, expected_rows=sizes.expected_rows,
            device=rows.x.device, run=run_empty,
        )  # fmt: skip
        counts = rows.expert_num_tokens.contiguous()
        blocks = blocks_of_batch(counts, sizes.C, _BLOCK_ROWS, scratch=b.ints, pdl=pdl)
        up(*_in_fp8(rows, blocks, b, sizes, pdl=pdl), counts, sizes.expected_rows)
        activate_quantize_batch(
            b.gate_up, blocks, capacity=sizes.C, out_EDF=b.activated, scales_EDJ=b.activated_scales,
            activation=self._activation, block_rows=_BLOCK_ROWS, pdl=pdl,
        )  # fmt: skip
        down(counts, sizes.expected_rows)
        if b.out is not b.y:
            b.out.copy_(b.y[:, : sizes.C])
        return b.out


def _in_fp8(
    rows: BatchedRows, blocks: AlignedRows, b: _Buffers, sizes: _Sizes, *, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Values and scales as the first GEMM takes them: as they came, or in the workspace."""
    if rows.x_scale is not None and sizes.D == sizes.C:
        _, C, G = rows.x_scale.shape
        if rows.x_scale.stride() == (G * C, 1, C):
            return rows.x, rows.x_scale
    quantize_batch(
        rows.x.contiguous(), blocks, out_EDH=b.x, scales_EDG=b.x_scales, x_scale_ECG=rows.x_scale,
        block_rows=_BLOCK_ROWS, pdl=pdl,
    )  # fmt: skip
    return b.x, b.x_scales


def _part(buffer: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of a buffer as a tensor."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _batched(rows: Rows) -> BatchedRows:
    return batched(rows, experts="deep_gemm_batched", instead="deep_gemm")


def _sizes(rows: BatchedRows, weights: ExpertWeights) -> _Sizes:
    E, H, F = weights.w2.shape
    return _Sizes(E=E, C=rows.x.shape[1], H=H, F=F)


def _require_fitting(rows: BatchedRows, weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of both weights."""
    require_batched_shapes(rows, weights, _WHERE)
    require_row_scales(rows, _WHERE)
    require_deep_gemm(rows, weights, _WHERE)
    if weights.w13_scale is None or weights.w2_scale is None:
        raise UnsupportedError(f"unquantised weights in {_WHERE}", instead="use the triton_batched experts")
    return weights.w13_scale, weights.w2_scale

"""What `bench experts` runs on one shape: parts of this package, vLLM's kernels, DeepGEMM's GEMMs alone, plain torch.

Letters: M tokens, K top-k, S = M * K slots, E experts, H hidden, F expert intermediate, P rows of a layout.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from vllm_moe_modular.bench.problems import activation_of
from vllm_moe_modular.bench.shapes import Shape
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.deep_gemm_library import expected_rows, load_deep_gemm
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.place_rows import max_placed_rows, place_rows, scratch_ints
from vllm_moe_modular.kernels.tuned_tables import TunedTable
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.vllm_adapter import peers

Layer = Callable[[StandardRows], torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """A layer on weights of its own shape.

    Attributes:
        workspace_bytes: scratch memory of one call, the result's included where it lies there; None: measured.
        is_layer: it returns what a layer does, which can be checked.
        note: what its numbers have to be read with.
    """

    layer: Layer
    workspace_bytes: Callable[[StandardRows], int] | None = None
    is_layer: bool = True
    note: str = ""


def of_part(part: PermuteExpertsUnpermute, weights: ExpertWeights, workspace: Workspace | None = None) -> Candidate:
    """A part on these weights.

    Args:
        workspace: None: one of its own, as what grows for one would move under the captured graph of another.
    """
    workspace = workspace or Workspace(weights.w2.device)

    def layer(rows: StandardRows) -> torch.Tensor:
        return part.apply(
            rows, weights, workspace=workspace(part.workspace(rows, weights)),
            weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False,
        )  # fmt: skip

    return Candidate(layer, lambda rows: sum(spec.nbytes for spec in part.workspace(rows, weights)))


Make = Callable[[Shape, ExpertWeights, TunedTable], Candidate]


def _triton(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:
    return of_part(TritonExperts(activation_of(shape), tuned=tuned), weights)


def _deep_gemm(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    return of_part(DeepGemmExperts(activation_of(shape)), weights)


def _vllm(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    layer = peers.fused_experts(weights, activation_of(shape))
    return Candidate(layer, note="" if peers.ships_a_table(weights) else "its default: it ships no table for the shape")


def _vllm_deep_gemm(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    layer, nbytes = peers.triton_or_deep_gemm(weights, shape.K)
    return Candidate(layer, lambda rows: nbytes(len(rows.x)))


def _matmul_ogs(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    return Candidate(peers.matmul_ogs(weights, activation_of(shape)))


def _torch(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    if shape.fp8:
        raise UnsupportedError("fp8 in blocks of 128 x 128 in torch._grouped_mm", instead="measure it in bfloat16")
    return Candidate(partial(_sorted_grouped_mm, shape, weights))


def _gemms(shape: Shape, weights: ExpertWeights, tuned: TunedTable) -> Candidate:  # noqa: ARG001
    return Candidate(gemms_alone(shape, weights), is_layer=False)


CANDIDATES: dict[str, Make] = {
    "triton": _triton,
    "deep_gemm": _deep_gemm,
    "vllm": _vllm,
    "vllm_deep_gemm": _vllm_deep_gemm,
    "matmul_ogs": _matmul_ogs,
    "torch": _torch,
    "gemms": _gemms,
}
"""`vllm` is its Triton kernel, `vllm_deep_gemm` its DeepGEMM experts. `gemms` is what nobody who uses
DeepGEMM can go below: its two GEMMs, and nothing around them."""


def ours(shape: Shape, tuned: TunedTable, weights: ExpertWeights) -> dict[str, Candidate]:
    """Those of this package that run the shape here; DeepGEMM need not be there, and takes no biases."""
    made = {"triton": _triton(shape, weights, tuned)}
    if weights.w2_bias is None:
        with suppress(UnsupportedError):
            made["deep_gemm"] = _deep_gemm(shape, weights, tuned)
    return made


def _sorted_grouped_mm(shape: Shape, weights: ExpertWeights, rows: StandardRows) -> torch.Tensor:
    """Sort, two grouped products, an activation, a weighted sum: what torch alone can capture in a CUDA graph."""
    ids = rows.topk_ids.flatten()
    order = ids.argsort()
    experts = ids[order]
    ends = torch.searchsorted(experts, torch.arange(1, shape.E + 1, device=ids.device, dtype=ids.dtype)).int()
    gate_up = torch._grouped_mm(rows.x[order // shape.K], weights.w13.mT, offs=ends)
    if weights.w13_bias is not None:
        gate_up = gate_up + weights.w13_bias[experts]
    a = activation_of(shape)
    activated = gated_activation(
        gate_up, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    y = torch._grouped_mm(activated, weights.w2.mT, offs=ends)
    if weights.w2_bias is not None:
        y = y + weights.w2_bias[experts]
    y = torch.empty_like(y).index_copy_(0, order, y).view(-1, shape.K, shape.H)
    return (y * rows.topk_weights.to(y.dtype)[..., None]).sum(1)


def gemms_alone(shape: Shape, weights: ExpertWeights) -> Layer:
    """DeepGEMM's two products over random rows, in the layout that the routing of each step gives."""
    if weights.w13_bias is not None:
        raise UnsupportedError("a bias in DeepGEMM", instead="measure a shape without one")
    library = load_deep_gemm()
    E, H, F, device = shape.E, shape.H, shape.F, weights.w2.device
    s13, s2 = weights.w13_scale, weights.w2_scale
    ends_of: dict[int, tuple[StandardRows, torch.Tensor]] = {}  # by id, which is one step's as long as it is held
    buffers_of: dict[int, list[torch.Tensor]] = {}  # by slots

    def ends(rows: StandardRows) -> torch.Tensor:
        if id(rows) not in ends_of:
            scratch = torch.empty(scratch_ints(rows.topk_ids.numel(), E), device=device, dtype=torch.int32)
            placed = place_rows(rows.topk_ids, E, library.alignment, scratch=scratch)
            ends_of[id(rows)] = rows, placed.ends
        return ends_of[id(rows)][1]

    def buffers(S: int) -> list[torch.Tensor]:
        if S not in buffers_of:
            P = max_placed_rows(S, E, library.alignment)
            x, activated = (torch.randn(P, n, device=device, dtype=torch.bfloat16).to(weights.w2.dtype) for n in (H, F))
            gate_up, y = (torch.empty(P, n, device=device, dtype=torch.bfloat16) for n in (2 * F, H))
            scales = [torch.ones(n // 128, P, device=device) for n in (H, F)] if s13 is not None else []
            buffers_of[S] = [x, gate_up, activated, y, *scales]
        return buffers_of[S]

    def layer(rows: StandardRows) -> torch.Tensor:
        S = rows.topk_ids.numel()
        x, gate_up, activated, y, *scales = buffers(S)
        gemm = partial(library.grouped_gemm, ends=ends(rows), expected_rows=expected_rows(S, E))
        gemm(x, weights.w13, out_PN=gate_up, scales=None if s13 is None else (scales[0], s13))
        gemm(activated, weights.w2, out_PN=y, scales=None if s2 is None else (scales[1], s2))
        return y

    return layer

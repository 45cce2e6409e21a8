"""Experts of the standard format in plain torch, one expert after the other.

Weights in fp8 are turned into the dtype of the activations one expert at a time, rows in fp8 all at once; nothing is
quantised.

Letters: R rows, K top-k, S = R * K slots, H hidden, F expert intermediate, E local experts, N rows of one expert.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch.nn.functional import gelu, linear, relu, silu

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import ShapeError
from vllm_moe_modular.experts.requirements import require_routing, standard
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import dequantized, dequantized_rows, require_row_scales, require_scales
from vllm_moe_modular.modular.prepare_finalize import Rows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy


class TorchExperts(PermuteExpertsUnpermute):
    """Runs wherever torch does: the product's kernel on a CPU. The host reads how many rows each expert has.

    Args:
        activation: between the two GEMMs.
    """

    activation_format: ClassVar[ActivationFormat] = ActivationFormat.STANDARD
    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset(WeightAndReduceBy)

    def __init__(self, *, activation: Activation) -> None:
        self._activation = activation

    @classmethod
    def build(cls, context: BuildContext) -> "TorchExperts":
        """For layers with this activation."""
        return cls(activation=context.require_activation())

    def apply(
        self,
        rows: Rows,
        weights: ExpertWeights,
        *,
        workspace: Sequence[torch.Tensor],  # noqa: ARG002 - torch allocates
        weight_and_reduce_by: WeightAndReduceBy,
        router_weight_on_input: bool,
        out_RH: torch.Tensor | None = None,  # noqa: ARG002 - the sum is in float32, and copied anyway
    ) -> torch.Tensor:
        """See `PermuteExpertsUnpermute.apply`. Slots with an id below 0 or past the last local expert are left out.

        EXPERTS: weighted and summed in float32 (float64 for float64), rounded once; [R, H]. FINALIZE: [R, K, H],
        uninitialised behind an id of -1; no weight is applied, to the input neither.

        Raises:
            ShapeError: the rows are not of the weights' hidden size; ids, router weights or scales do not fit the rows;
                scales do not fit the weights.
            UnsupportedError: the rows are batched; weights or rows in float8_e4m3fn have no scales, or others have;
                the result in a dtype that is none of activations.
        """
        rows = standard(rows, experts="torch")
        (R, H), E = rows.x.shape, weights.w13.shape[0]
        if weights.w13.shape[2] != H:
            raise ShapeError("x", want=("R", "H"), values={"R": R, "H": weights.w13.shape[2]}, got=rows.x.shape)
        require_routing(rows, "the torch experts")
        require_scales(weights, "the torch experts")
        require_row_scales(rows, "the torch experts")
        x_RH, dtype, K = dequantized_rows(rows), rows.dtype, rows.topk_ids.shape[1]
        by_experts = weight_and_reduce_by is WeightAndReduceBy.EXPERTS
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        out = x_RH.new_zeros((R, H), dtype=accumulate) if by_experts else x_RH.new_empty((R * K, H))
        topk_weights_S1 = rows.topk_weights.reshape(-1, 1)
        for expert, slots_N in _slots_of_experts(rows.topk_ids, E):
            rows_N = slots_N // K
            x_NH = x_RH[rows_N]
            if by_experts and router_weight_on_input:
                x_NH = (x_NH * topk_weights_S1[slots_N]).to(x_NH.dtype)
            y_NH = self._expert(x_NH, weights, expert)
            if not by_experts:
                out[slots_N] = y_NH
                continue
            y_NH = y_NH.to(accumulate)
            if not router_weight_on_input:
                y_NH *= topk_weights_S1[slots_N]
            out.index_add_(0, rows_N, y_NH)
        return out.to(dtype) if by_experts else out.view(R, K, H)

    def _expert(self, x_NH: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
        bias13, bias2 = weights.w13_bias, weights.w2_bias
        scale13, scale2 = weights.w13_scale, weights.w2_scale
        w13, w2 = weights.w13[expert], weights.w2[expert]
        if scale13 is not None and scale2 is not None:
            w13, w2 = dequantized(w13, scale13[expert], x_NH.dtype), dequantized(w2, scale2[expert], x_NH.dtype)
        h = linear(x_NH, w13, None if bias13 is None else bias13[expert])
        a_NF = activate(h, self._activation)
        return linear(a_NF, w2, None if bias2 is None else bias2[expert])


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation, in the dtype of `h`, which it may overwrite.

    Args:
        h: [N, 2F], or [N, F] for an activation without a gate.

    Returns:
        [N, F].
    """
    if not activation.kind.is_gated:
        return _UNGATED[activation.kind](h if activation.limit is None else h.clamp_(max=activation.limit))
    gate, up = (h[:, 0::2], h[:, 1::2]) if activation.interleaved else h.chunk(2, dim=1)
    if activation.limit is not None:
        gate, up = gate.clamp_(max=activation.limit), up.clamp_(-activation.limit, activation.limit)
    if activation.kind is ActivationKind.SWIGLU_OAI:
        return torch.sigmoid(activation.alpha * gate).mul_(gate).mul_(up.add_(activation.beta))
    return _GATES[activation.kind](gate).mul_(up)


_GATES: Mapping[ActivationKind, Callable[[torch.Tensor], torch.Tensor]] = {
    ActivationKind.SILU: silu,
    ActivationKind.GELU: gelu,
    ActivationKind.GELU_TANH: lambda gate: gelu(gate, approximate="tanh"),
}

_UNGATED: Mapping[ActivationKind, Callable[[torch.Tensor], torch.Tensor]] = {
    ActivationKind.SILU_NO_MUL: silu,
    ActivationKind.GELU_NO_MUL: gelu,
    ActivationKind.RELU2_NO_MUL: lambda h: relu(h).square_(),
}


def _slots_of_experts(topk_ids_RK: torch.Tensor, E: int) -> list[tuple[int, torch.Tensor]]:
    """Every expert that has rows with its slots, ascending; slot r * K + k is row r's k-th choice."""
    ids_S = topk_ids_RK.flatten()
    # One bin past the last expert for what is not here: an id of -1 would count for none, or for the last.
    bins_S = torch.where((ids_S >= 0) & (ids_S < E), ids_S, E)
    counts = torch.bincount(bins_S, minlength=E + 1).tolist()[:E]
    slots = torch.split(bins_S.argsort(stable=True)[: sum(counts)], counts)
    return [(expert, slots[expert]) for expert, count in enumerate(counts) if count]

"""The factory, and what every era's `FusedMoEModularMethod` does at a forward."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.two_kernels import Kernel
from vllm_moe_modular.vllm_adapter.layer import MoELayer
from vllm_moe_modular.vllm_adapter.runtime import Plan

if TYPE_CHECKING:
    from vllm_moe_modular.vllm_adapter.adapter import Adapter


def maybe_make_fused_moe_modular_method(
    layer: MoELayer, plan: Plan, placement: ExpertPlacement, adapter: "Adapter"
) -> Any | None:
    """Build the all-to-all, the experts and the kernel that `plan` chose, and the method that runs them.

    Args:
        placement: which rank holds which expert, as all ranks agreed.
        adapter: of this vLLM.

    Returns:
        What goes in the place of the layer's quant method, or None where the plan leaves the layer to vLLM.
    """
    if plan.choice is None:
        return None
    runtime, problem, reads_weights = adapter.runtime, plan.problem, plan.choice.experts.raw_weights
    sends = plan.choice.all2all.load().output_is_reduced
    share = layer.ranks.tp_size if sends or layer.ranks.tokens_sliced else 1  # of a step's tokens, as ModularForward
    capacity = -(-problem.capacity_tokens // share)
    context = BuildContext(
        device=layer.device,
        dtype=getattr(torch, problem.dtype),
        placement=placement,
        rank=layer.ranks.ep_rank,
        group=runtime.group,
        hidden=problem.hidden,
        top_k=problem.top_k,
        capacity_tokens=capacity,
        activation=layer.activation,
        low_latency_tokens=runtime.settings.low_latency_tokens,
        fp8_rows=plan.choice.takes_fp8_rows(problem),
        layer=layer.module,
        tuned=runtime.settings.tuned,
    )
    # What CUDA graphs capture has to be small, so that no captured step takes the way of large ones.
    captured = -(-problem.captured_tokens // share)
    kernel = runtime.build_kernel(plan.choice, context, most_small=max(context.low_latency_tokens, captured))
    if reads_weights:
        weights = layer.weights()
        steps: Any = {
            "max_tokens_per_rank": capacity,
            "top_k": problem.top_k,
            "dtype": context.dtype,
            "fp8_rows": context.fp8_rows,
        }
        runtime.workspace.reserve(kernel.workspace_bytes(weights, **steps))
        if layer.device.type == "cuda":
            kernel.compile_ahead(weights, router_weight_on_input=layer.router_weight_on_input, **steps)
    forward = ModularForward(kernel, layer, reads_weights=reads_weights, tokens_bound=adapter.tokens_bound)
    return adapter.make_method(layer, forward)


_NOT_READ = ExpertWeights(w13=torch.empty(0), w2=torch.empty(0))


class ModularForward:
    """Runs a kernel on a layer's tokens, and deals with tokens that tensor-parallel ranks hold in common.

    An all-to-all wants each token from one rank only. Where the tensor-parallel ranks all hold the same tokens, each
    sends its own slice and leaves the rest of its output zero: the sum that vLLM makes over those ranks anyway, which
    the shared experts need too, then puts the slices together.

    Args:
        reads_weights: the experts read the layer's weights; else they know where to find them.
        tokens_bound: the largest token count of any data-parallel rank in this step; None: all ranks hold as many as
            this one.
    """

    def __init__(
        self,
        kernel: Kernel,
        layer: MoELayer,
        *,
        tokens_bound: Callable[[], int | None],
        reads_weights: bool = True,
    ) -> None:
        self.kernel = kernel
        self.layer = layer
        self.reads_weights = reads_weights
        self.tokens_bound = tokens_bound
        self._ranks = layer.ranks
        sends = kernel.output_is_reduced
        self.slices = sends and self._ranks.tp_size > 1 and not self._ranks.tokens_sliced

    @property
    def output_is_reduced(self) -> bool:
        """Whether the output needs no further sum over the tensor-parallel ranks."""
        return self.kernel.output_is_reduced and not self.slices

    def __call__(
        self,
        x_TH: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        T, ranks, bound = x_TH.shape[0], self._ranks, self.tokens_bound()
        if not self.slices:
            if bound is None:
                bound = T
            elif ranks.tokens_sliced:
                bound = -(-bound // ranks.tp_size)
            return self._apply(x_TH, topk_weights_TK, topk_ids_TK, bound, meanwhile)
        size = -(-T // ranks.tp_size)
        bound = size if bound is None else -(-bound // ranks.tp_size)
        mine = slice(size * ranks.tp_rank, size * (ranks.tp_rank + 1))
        out_TH = torch.zeros_like(x_TH)
        out_TH[mine] = self._apply(x_TH[mine], topk_weights_TK[mine], topk_ids_TK[mine], bound, meanwhile)
        return out_TH

    def _apply(
        self,
        x_TH: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        max_tokens_per_rank: int,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        return self.kernel.apply(
            x_TH,
            topk_ids_TK,
            topk_weights_TK,
            self.layer.weights() if self.reads_weights else _NOT_READ,
            max_tokens_per_rank=max_tokens_per_rank,
            router_weight_on_input=self.layer.router_weight_on_input,
            meanwhile=meanwhile,
        )


def no_modular_form(quant_method: Any) -> str:
    """Why a layer with this method is left alone."""
    return f"vLLM's {type(quant_method).__name__} has no modular form here; the layer stays with vLLM"


def require_eplb_maps(
    old_quant_method: Any,
    *,
    supported: bool,
    expert_load_view: torch.Tensor | None,
    logical_to_physical_map: torch.Tensor | None,
    logical_replica_count: torch.Tensor | None,
) -> None:
    """What 0.11 asks of a method when expert load balancing is on.

    Args:
        supported: whether vLLM's own method of the layer can balance its experts.

    Raises:
        NotImplementedError: it cannot; names it.
        ValueError: it can, and a map is missing; names it.
    """
    name = type(old_quant_method).__name__
    if not supported:
        raise UnsupportedError(f"expert load balancing of {name}", instead="serve without --enable-eplb")
    maps = {
        "expert_load_view": expert_load_view,
        "logical_to_physical_map": logical_to_physical_map,
        "logical_replica_count": logical_replica_count,
    }
    if missing := [k for k, v in maps.items() if v is None]:
        raise ValueError(
            f"expert load balancing of {name} needs all three maps, {', '.join(missing)} is missing; "
            "set the layer up with set_eplb_state"
        )

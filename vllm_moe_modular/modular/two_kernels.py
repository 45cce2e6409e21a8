"""One kernel for small steps, another for the rest: an all-to-all for each, with experts that go with it."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_moe_modular.errors import IncompatiblePartsError
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.kernel import ModularKernel, Observe
from vllm_moe_modular.modular.prepare_finalize import PrepareAndFinalize


class TwoKernels:
    """What a `ModularKernel` is to those that run a layer. Which of the two runs depends on the announced step alone:
    neither on what a rank itself has nor on whether a CUDA graph is captured, so that all ranks choose alike.

    Args:
        small: for steps of at most `most_small` tokens of the fullest rank.
        large: for the others.

    Raises:
        IncompatiblePartsError: the output of one is the sum over all ranks, that of the other is not.
    """

    def __init__(self, *, small: ModularKernel, large: ModularKernel, most_small: int) -> None:
        if small.output_is_reduced != large.output_is_reduced:
            raise IncompatiblePartsError(
                f"{type(small.prepare_finalize).__name__} for small steps beside "
                f"{type(large.prepare_finalize).__name__}: of one the output is added up over the ranks, of the other "
                "it is not; choose two that do alike"
            )
        self.small = small
        self.large = large
        self.most_small = most_small

    @property
    def prepare_finalize(self) -> PrepareAndFinalize[Any]:
        """That of large steps, for those that look at one pair."""
        return self.large.prepare_finalize

    @property
    def experts(self) -> PermuteExpertsUnpermute:
        """Those of large steps."""
        return self.large.experts

    @property
    def output_is_reduced(self) -> bool:
        """See `PrepareAndFinalize`; of both."""
        return self.large.output_is_reduced

    @property
    def supports_async(self) -> bool:
        """Whether work that is given as `meanwhile` overlaps with anything, in either."""
        return self.small.supports_async or self.large.supports_async

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that the router should give topk_ids in; each kernel casts what differs."""
        return self.small.topk_indices_dtype or self.large.topk_indices_dtype

    @property
    def observe(self) -> Observe | None:
        """Looks at calls of both."""
        return self.large.observe

    @observe.setter
    def observe(self, observe: Observe | None) -> None:
        self.small.observe = self.large.observe = observe

    def workspace_bytes(
        self,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        top_k: int,
        dtype: torch.dtype,
        fp8_rows: bool = False,
    ) -> int:
        """The scratch memory of the larger of the two; they never run at the same time."""
        most = {self.small: min(self.most_small, max_tokens_per_rank), self.large: max_tokens_per_rank}
        return max(
            kernel.workspace_bytes(weights, max_tokens_per_rank=tokens, top_k=top_k, dtype=dtype, fp8_rows=fp8_rows)
            for kernel, tokens in most.items()
        )

    def compile_ahead(
        self,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        top_k: int,
        dtype: torch.dtype,
        fp8_rows: bool = False,
        router_weight_on_input: bool = False,
    ) -> None:
        """See `ModularKernel.compile_ahead`."""
        most = {self.small: min(self.most_small, max_tokens_per_rank), self.large: max_tokens_per_rank}
        for kernel, tokens in most.items():
            kernel.compile_ahead(
                weights,
                max_tokens_per_rank=tokens,
                top_k=top_k,
                dtype=dtype,
                fp8_rows=fp8_rows,
                router_weight_on_input=router_weight_on_input,
            )

    def apply(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See `ModularKernel.apply`."""
        kernel = self.small if max_tokens_per_rank <= self.most_small else self.large
        return kernel.apply(
            x_TH,
            topk_ids_TK,
            topk_weights_TK,
            weights,
            max_tokens_per_rank=max_tokens_per_rank,
            router_weight_on_input=router_weight_on_input,
            meanwhile=meanwhile,
        )


Kernel = ModularKernel | TwoKernels
"""What runs a layer."""

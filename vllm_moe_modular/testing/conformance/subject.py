"""An all-to-all under test on one rank, and the layer around it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.testing.conformance.outcome import Notes
from vllm_moe_modular.testing.conformance.plain_experts import plain_experts
from vllm_moe_modular.testing.layers import SILU, Batch, Case, make_batch, make_weights, of_rank
from vllm_moe_modular.testing.ranks import Here

if TYPE_CHECKING:
    from vllm_moe_modular.testing.conformance.run import Build


@dataclass(slots=True)
class Subject:
    """The part under test on one rank, and what is wrong with it so far."""

    here: Here
    build: "Build"
    dtypes: tuple[torch.dtype, ...]
    loss_timeout_s: float
    notes: Notes = field(default_factory=Notes)
    group: RankGroup | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def make(
        self, case: Case, dtype: torch.dtype | None = None, *, capacity: int | None = None, fp8_rows: bool = False
    ) -> PrepareAndFinalize[Any]:
        """A new part, over a group of its own.

        Args:
            fp8_rows: the experts take rows in fp8; the part may send such, or not.
        """
        self.group = RankGroup(self.here.group, timeout_s=self.loss_timeout_s, store=self.here.store)
        context = BuildContext(
            device=self.here.device,
            dtype=dtype or self.dtype,
            placement=case.placement,
            rank=self.here.rank,
            group=self.group,
            hidden=case.H,
            top_k=case.K,
            capacity_tokens=case.max_tokens_per_rank if capacity is None else capacity,
            activation=SILU,
            low_latency_tokens=256,
            fp8_rows=fp8_rows,
        )
        part: PrepareAndFinalize[Any] = self.build(context)
        self.notes.part_was_made = True
        return part

    def source(self, part: PrepareAndFinalize[Any]) -> int:
        """Whose tokens this rank brings: all ranks bring those of rank 0 where nothing moves and somebody adds up."""
        return self.here.rank if part.output_is_reduced else 0

    def batch(
        self, part: PrepareAndFinalize[Any], case: Case, dtype: torch.dtype | None = None, seed: int = 0
    ) -> Batch:
        return make_batch(case, self.source(part), dtype or self.dtype, seed=seed).to(self.here.device)

    def layer(
        self, part: PrepareAndFinalize[Any], case: Case, batch: Batch, *, max_tokens: int | None = None
    ) -> torch.Tensor:
        """The output of the whole layer for `batch`, on the CPU; notes what is written to."""
        kernel = ModularKernel(part, plain_experts(part), allocate=Workspace(self.here.device))
        weights = of_rank(make_weights(case, batch.x.dtype), case.placement, self.here.rank, self.here.device)
        given = (batch.x, batch.topk_ids, batch.topk_weights)
        before = [t.clone() for t in given]
        out = kernel.apply(
            *given,
            weights,
            max_tokens_per_rank=case.max_tokens_per_rank if max_tokens is None else max_tokens,
            router_weight_on_input=case.weight_on_input,
            meanwhile=lambda: self.check_untouched(given, before, "when the shared experts run"),
        )
        self.check_untouched(given, before, "after the layer")
        self.notes.check(out.shape == batch.x.shape and out.dtype == batch.x.dtype, "the output has another shape")
        return self.reduced(part, out)

    def check_untouched(self, now: tuple[torch.Tensor, ...], before: list[torch.Tensor], when: str) -> None:
        for name, a, b in zip(("x", "topk_ids", "topk_weights"), now, before, strict=True):
            same = torch.equal(bits(a), bits(b))
            self.notes.check(same, f"it writes to its input: {name} is not what it was {when}")

    def reduced(self, part: PrepareAndFinalize[Any], out: torch.Tensor) -> torch.Tensor:
        """`out`, added up over the ranks where the part leaves that to others."""
        if part.output_is_reduced:
            return out.cpu()
        total = out.double()
        dist.all_reduce(total, group=self.here.group)
        return total.to(out.dtype).cpu()

    def prepare(self, part: PrepareAndFinalize[Any], case: Case, batch: Batch) -> Dispatched[Any]:
        ids = batch.topk_ids.to(part.topk_indices_dtype or batch.topk_ids.dtype)
        return part.prepare(
            batch.x,
            ids,
            batch.topk_weights,
            max_tokens_per_rank=case.max_tokens_per_rank,
            router_weight_on_input=case.weight_on_input,
        )


def bits(t: torch.Tensor) -> torch.Tensor:
    """Its memory, so that NaN equals NaN and 0 not -0."""
    return t.contiguous().view(-1).view(torch.uint8)


def is_close(out: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> bool:
    """Up to a few roundings in `dtype`: for what is looked at too often to run plain torch beside it."""
    bound = 1e-4 if dtype == torch.float32 else 0.04
    return torch.allclose(out.double(), truth, rtol=bound, atol=bound)

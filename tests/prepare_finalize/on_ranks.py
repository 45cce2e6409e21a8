"""What the ranks of a test run; importable by name in their processes."""

from typing import Any

import torch

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.prepare_finalize import PrepareAndFinalize
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, of_rank
from vllm_moe_modular.testing.ranks import Here

TIMEOUT_S = 60.0


def build_context(here: Here, case: Case, dtype: torch.dtype) -> BuildContext:
    return BuildContext(
        device=here.device,
        dtype=dtype,
        placement=case.placement,
        rank=here.rank,
        group=RankGroup(here.group, timeout_s=TIMEOUT_S, store=here.store),
        hidden=case.H,
        top_k=case.K,
        capacity_tokens=case.max_tokens_per_rank,
        activation=SILU,
        low_latency_tokens=256,
    )


def build_part(here: Here, name: str, case: Case, dtype: torch.dtype = torch.float32) -> PrepareAndFinalize[Any]:
    part = next(p for p in builtin_registry().of(PartKind.PREPARE_FINALIZE) if p.name == name)
    built: PrepareAndFinalize[Any] = part.load().build(build_context(here, case, dtype))
    return built


def kernel_over(part: PrepareAndFinalize[Any], here: Here) -> ModularKernel:
    return ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(here.device))


def layer(here: Here, name: str, case: Case, dtype: torch.dtype) -> torch.Tensor:
    """The output of one layer for this rank's batch, which must be as it was afterwards."""
    kernel = kernel_over(build_part(here, name, case, dtype), here)
    batch = make_batch(case, here.rank, dtype).to(here.device)
    before = [t.clone() for t in (batch.x, batch.topk_ids, batch.topk_weights)]
    out = kernel.apply(
        batch.x,
        batch.topk_ids,
        batch.topk_weights,
        of_rank(make_weights(case, dtype), case.placement, here.rank, here.device),
        max_tokens_per_rank=case.max_tokens_per_rank,
        router_weight_on_input=case.weight_on_input,
    )
    for now, then in zip((batch.x, batch.topk_ids, batch.topk_weights), before, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num()), "the layer wrote to its input"
    return out.cpu()


def two_calls_in_flight(here: Here, name: str, case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """prepare a, prepare b, finalize b, finalize a: what came home, and what one call after the other gives."""
    part = build_part(here, name, case)
    weights = of_rank(make_weights(case, torch.float32), case.placement, here.rank, here.device)
    experts = TorchExperts(activation=SILU)
    batches = [make_batch(case, here.rank, torch.float32, seed=seed).to(here.device) for seed in (1, 2)]
    dispatched = [
        part.prepare(
            b.x, b.topk_ids, b.topk_weights,
            max_tokens_per_rank=case.max_tokens_per_rank, router_weight_on_input=False,
        )
        for b in batches
    ]  # fmt: skip
    rows = [
        experts.apply(
            d.rows, weights, workspace=(), weight_and_reduce_by=part.weight_and_reduce_by, router_weight_on_input=False
        )
        for d in dispatched
    ]
    overlapping = [torch.empty_like(b.x) for b in batches]
    waits = [part.finalize_async(rows[i], dispatched[i].ticket, out_TH=overlapping[i]) for i in (1, 0)]
    for wait in reversed(waits):
        wait()
    kernel = kernel_over(part, here)
    one_by_one = [
        kernel.apply(b.x, b.topk_ids, b.topk_weights, weights, max_tokens_per_rank=case.max_tokens_per_rank)
        for b in batches
    ]
    return [(a.cpu(), b.cpu()) for a, b in zip(overlapping, one_by_one, strict=True)]

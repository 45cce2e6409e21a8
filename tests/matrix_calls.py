"""What the ranks of `test_part_matrix` run; importable by name in their processes."""

import torch
import torch.distributed as dist

from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.testing.conformance import Target
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, of_rank
from vllm_moe_modular.testing.ranks import Here


def layer(here: Here, all2all: str, experts: str, case: Case, dtype: torch.dtype, replicated: bool) -> torch.Tensor:
    """This rank's output; where all ranks hold the same tokens, what a sum over them gives."""
    context = BuildContext(
        device=here.device,
        dtype=dtype,
        placement=case.placement,
        rank=here.rank,
        group=RankGroup(here.group, timeout_s=30.0, store=here.store),
        hidden=case.H,
        top_k=case.K,
        capacity_tokens=case.max_tokens_per_rank,
        activation=SILU,
        low_latency_tokens=256,
    )
    part = Target(all2all)(context)
    kernel = ModularKernel(part, Target(experts)(context), allocate=Workspace(here.device))
    batch = make_batch(case, 0 if replicated else here.rank, dtype)
    out = kernel.apply(
        batch.x,
        batch.topk_ids,
        batch.topk_weights,
        of_rank(make_weights(case, dtype), case.placement, here.rank),
        max_tokens_per_rank=case.max_tokens_per_rank,
    )
    if part.output_is_reduced:
        return out
    total = out.double()
    dist.all_reduce(total, group=here.group)
    return total.to(dtype)

"""What the ranks of `test_nccl` run; importable by name in their processes."""

import os
import signal
import time

import torch

from tests.prepare_finalize.on_ranks import build_part, kernel_over
from vllm_moe_modular.errors import RankLostError
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.testing.layers import Case, make_batch, make_weights, of_rank
from vllm_moe_modular.testing.ranks import Here

LOSS_TIMEOUT_S = 4.0


def past_the_end_and_none(here: Here, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same layer with ids past the end, and with -1 in their place."""
    case = Case("", tokens=(20, 10), absent=0.3)
    kernel, batch = kernel_over(build_part(here, name, case), here), make_batch(case, here.rank, torch.float32)
    batch = batch.to(here.device)
    weights = of_rank(make_weights(case, torch.float32), case.placement, here.rank, here.device)
    past_the_end = batch.topk_ids.masked_fill(batch.topk_ids < 0, case.G + 3)
    return tuple(  # type: ignore[return-value]
        kernel.apply(batch.x, ids, batch.topk_weights, weights, max_tokens_per_rank=20).cpu()
        for ids in (past_the_end, batch.topk_ids)
    )


def captured_and_eager(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
    """There and back without experts: every rank returns the rows that it was sent."""
    case = Case("", tokens=(6, 6))
    part, batch = build_part(here, "allgather", case), make_batch(case, here.rank, torch.float32).to(here.device)
    outs = [torch.empty_like(batch.x), torch.empty_like(batch.x)]

    def there_and_back(out: torch.Tensor) -> None:
        dispatched = part.prepare(
            batch.x, batch.topk_ids, batch.topk_weights, max_tokens_per_rank=6, router_weight_on_input=False
        )
        part.finalize(dispatched.rows.x, dispatched.ticket, out_TH=out)

    there_and_back(outs[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back(outs[0])
    graph.replay()
    torch.cuda.synchronize()
    return outs[0].cpu(), outs[1].cpu()


def lose_rank_1(here: Here, how: str) -> tuple[str, float]:
    """Rank 1 dies or sleeps before its step 2; the error of rank 0, and the seconds that it took."""
    group = RankGroup(here.group, timeout_s=LOSS_TIMEOUT_S, store=here.store)
    ones = torch.ones(2, dtype=torch.int32, device=here.device)
    group.exchange_counts(ones, phase="dispatch")
    time.sleep(1.2)  # long enough for a beat that says so
    if here.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    start = time.monotonic()
    try:
        group.exchange_counts(ones, phase="combine")
    except RankLostError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start

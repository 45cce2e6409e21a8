"""What the ranks of `test_field_cases` run; importable by name in their processes."""

import time

import torch

from tests.prepare_finalize.on_ranks import build_part, kernel_over
from vllm_moe_modular.errors import AgreementError, CapacityError, ExpertIdError
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.prepare_finalize.torch_all_to_all import TorchPrepareAndFinalize
from vllm_moe_modular.testing.layers import Case, make_batch, make_weights, of_rank
from vllm_moe_modular.testing.ranks import Here


def shared_and_routed(here: Here, name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The input as the shared experts found it, the routed output, and how often the shared experts ran."""
    batch, seen = make_batch(case, here.rank, torch.float32), []
    out = kernel_over(build_part(here, name, case), here).apply(
        batch.x,
        batch.topk_ids,
        batch.topk_weights,
        of_rank(make_weights(case, torch.float32), case.placement, here.rank),
        max_tokens_per_rank=case.max_tokens_per_rank,
        router_weight_on_input=case.weight_on_input,
        meanwhile=lambda: seen.append(batch.x.clone()),
    )
    return seen[0], out, len(seen)


def minus_one_beside_the_last_expert(here: Here, name: str) -> torch.Tensor:
    """Every token names expert 0 and -1; behind -1 stands a weight that would show."""
    case = Case("", tokens=(3, 3), G=4)
    batch = make_batch(case, here.rank, torch.float32)
    ids, weights = torch.tensor([[0, -1]] * 3), torch.tensor([[0.5, 1000.0]] * 3)
    return kernel_over(build_part(here, name, case), here).apply(
        batch.x,
        ids,
        weights,
        of_rank(make_weights(case, torch.float32), case.placement, here.rank),
        max_tokens_per_rank=3,
    )


def refused_before_sending(here: Here, name: str, what: str) -> tuple[str, int]:
    """Rank 0 makes the mistake, rank 1 does nothing: the error, and how many steps of the group were begun."""
    case = Case("", tokens=(3, 3), G=4)
    part = build_part(here, name, case)
    batch = make_batch(case, 0, torch.float32)
    ids = batch.topk_ids
    if what == "id":
        ids[1, 1] = 4
    message = ""
    if here.rank == 0:
        try:
            part.prepare(
                batch.x, ids, batch.topk_weights,
                max_tokens_per_rank=2 if what == "capacity" else 3, router_weight_on_input=False,
            )  # fmt: skip
        except (ExpertIdError, CapacityError) as error:
            message = str(error)
    return message, part._group.step  # type: ignore[attr-defined]


def steps_begun(here: Here, name: str, case: Case) -> int:
    """By one layer."""
    part, batch = build_part(here, name, case), make_batch(case, here.rank, torch.float32)
    weights = of_rank(make_weights(case, torch.float32), case.placement, here.rank)
    kernel_over(part, here).apply(
        batch.x, batch.topk_ids, batch.topk_weights, weights, max_tokens_per_rank=case.max_tokens_per_rank
    )
    steps: int = part._group.step  # type: ignore[attr-defined]
    return steps


def traffic_of(here: Here, name: str, ids: torch.Tensor) -> tuple[list[int], list[int], int]:
    """The same ids on every rank, 4 experts over two ranks."""
    case = Case("", tokens=(len(ids),) * 2, G=4, K=ids.shape[1])
    part = build_part(here, name, case)
    x = make_batch(case, here.rank, torch.float32).x
    rows = part.prepare(x, ids, torch.ones(ids.shape), max_tokens_per_rank=len(ids), router_weight_on_input=False).rows
    assert isinstance(rows, StandardRows)
    traffic = part.traffic  # type: ignore[attr-defined]
    return traffic.rows_sent, traffic.rows_received, len(rows.x)


def sum_of_partial_sums(here: Here, name: str) -> float:
    """In bfloat16; one token that has an expert on each of three ranks, which return 256, 1 and 1."""
    case = Case("", tokens=(1, 1, 1), G=3, K=3)
    part = build_part(here, name, case, torch.bfloat16)
    x = torch.zeros((1, case.H), dtype=torch.bfloat16)
    dispatched = part.prepare(
        x, torch.tensor([[0, 1, 2]]), torch.ones(1, 3), max_tokens_per_rank=1, router_weight_on_input=False
    )
    assert isinstance(dispatched.rows, StandardRows)
    out = torch.empty_like(x)
    part.finalize(torch.full_like(dispatched.rows.x, (256, 1, 1)[here.rank]), dispatched.ticket, out_TH=out)
    return out[0, 0].item()


def rows_with_an_expert(here: Here, name: str, case: Case) -> int:
    """After dispatch, on this rank."""
    part, batch = build_part(here, name, case), make_batch(case, here.rank, torch.float32)
    rows = part.prepare(
        batch.x,
        batch.topk_ids,
        batch.topk_weights,
        max_tokens_per_rank=case.max_tokens_per_rank,
        router_weight_on_input=False,
    ).rows
    assert isinstance(rows, StandardRows)
    return int((rows.topk_ids >= 0).any(dim=1).sum())


def seconds_of_finalize_async(here: Here, name: str) -> tuple[float, float]:
    """Rank 1 comes home a second late: how long starting and waiting took."""
    case = Case("", tokens=(3, 3), G=4)
    part, batch = build_part(here, name, case), make_batch(case, here.rank, torch.float32)
    dispatched = part.prepare(
        batch.x, batch.topk_ids, batch.topk_weights, max_tokens_per_rank=3, router_weight_on_input=False
    )
    assert isinstance(dispatched.rows, StandardRows)
    if here.rank == 1:
        time.sleep(1)
    start = time.monotonic()
    wait = part.finalize_async(dispatched.rows.x, dispatched.ticket, out_TH=torch.empty_like(batch.x))
    started = time.monotonic()
    wait()
    return started - start, time.monotonic() - started


def sized_by_the_wrong_group(here: Here) -> str:
    """A placement over half of the ranks, as if TP x DP ranks were counted by DP."""
    try:
        TorchPrepareAndFinalize(
            group=RankGroup(here.group, timeout_s=10),
            placement=ExpertPlacement.linear(8, here.size // 2),
            device=here.device,
        )
    except AgreementError as error:
        return str(error)
    return "no error"

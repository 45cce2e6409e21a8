"""What the ranks of a test run; importable by name in their processes."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import RankLostError
from vllm_moe_modular.modular.heartbeat import PERIOD_S
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.testing.ranks import Here

TIMEOUT_S = 2.0
"""Of the groups that lose a rank."""

HEALTHY_STEPS = 4


def healthy(here: Here) -> RankGroup:
    return RankGroup(here.group, timeout_s=60, store=here.store)


def ragged_exchange(here: Here, dtype: torch.dtype) -> list[list[float]]:
    """Rank r sends s rows that hold 10 r + s to rank s, so none to rank 0 and not as many as it receives."""
    group = healthy(here)
    sent, received = group.exchange_counts(torch.arange(here.size, dtype=torch.int32), phase="counts")
    x = torch.cat([torch.full((s, 3), 10.0 * here.rank + s) for s in sent]).to(dtype)
    out = torch.empty((sum(received), 3), dtype=dtype)
    group.all_to_all(out, x, out_rows=received, in_rows=sent, phase="rows")()
    assert group.step == 2
    return [row.float().tolist() for row in out]


def gather(here: Here) -> list[float]:
    out = torch.empty((here.size, 2, 1), dtype=torch.bfloat16)
    healthy(here).all_gather(out, torch.full((2, 1), float(here.rank), dtype=torch.bfloat16), phase="gather")()
    return out.flatten().tolist()


def waited_for_in_reverse(here: Here) -> list[float]:
    """Four exchanges over two groups of the same ranks, begun in different orders; the last is waited for first."""
    groups, outs, waits = [healthy(here), healthy(here)], [torch.empty((here.size, 1)) for _ in range(4)], []
    ones = [1] * here.size
    for number in (0, 1, 2, 3) if here.rank == 0 else (1, 0, 3, 2):
        x = torch.full((here.size, 1), 100.0 * number + here.rank)
        waits.append(groups[number % 2].all_to_all(outs[number], x, out_rows=ones, in_rows=ones, phase="rows"))
    for wait in reversed(waits):
        wait()
    return torch.cat(outs).flatten().tolist()


def refused_everywhere(here: Here, late_s: float) -> str:
    """Every rank refuses the same step and goes on, the last one later; what the step after that says."""
    group = RankGroup(here.group, timeout_s=30.0, store=here.store)
    out = torch.empty((here.size, 1, 1))

    def step() -> None:
        group.all_gather(out, torch.full((1, 1), float(here.rank)), phase="gather")()

    step()
    group.say_raised(ValueError("too many tokens"))
    if here.rank == here.size - 1:
        time.sleep(late_s)
    try:
        step()
    except RankLostError as error:
        return str(error)
    return "right"


def lose_a_rank(here: Here, lost: int, how: str) -> list[tuple[str, float]]:
    """`lost` dies or sleeps before its step 5; the others' errors, each with the seconds that it took.

    The errors are of a group with a store, of its next step, and of a group without one.
    """
    with_store = RankGroup(here.group, timeout_s=TIMEOUT_S, store=here.store)
    without = RankGroup(dist.new_group(), timeout_s=TIMEOUT_S)
    for _ in range(HEALTHY_STEPS):
        step(with_store, "dispatch")
        step(without, "dispatch")
    time.sleep(1.2)  # long enough for a beat that says so
    if here.rank == lost and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if here.rank == lost:
        time.sleep(2.5 * TIMEOUT_S)
        return [error_of(with_store)]
    errors = [error_of(with_store), error_of(with_store), error_of(without)]
    if how == "stall and leave":
        sys.exit()
    return errors


def step(group: RankGroup, phase: str) -> None:
    group.exchange_counts(torch.ones(group.size, dtype=torch.int32), phase=phase)


def error_of(group: RankGroup) -> tuple[str, float]:
    start = time.monotonic()
    try:
        step(group, "combine")
    except RankLostError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def raise_on_one(here: Here, raising: int, late: int | None) -> tuple[str, int | None, int | None, str, float]:
    """`raising` raises before its step 3 and lives on; the error of each other rank and the seconds that it took.

    `late` ends its wait some beats after the others, which have closed their connections by then.
    """
    group = RankGroup(here.group, timeout_s=30.0, store=here.store)
    if here.rank == late:
        interrupt = group._interrupt
        group._interrupt = lambda: (time.sleep(2 * PERIOD_S), interrupt())[1]  # type: ignore[method-assign]
    for _ in range(2):
        step(group, "dispatch")
    if here.rank == raising:
        group.say_raised(LookupError("no room\nhere"))
        time.sleep(5 * PERIOD_S)
        return "", None, None, "", 0.0
    start = time.monotonic()
    try:
        step(group, "combine")
    except RankLostError as error:
        return str(error), error.rank, error.step, error.phase, time.monotonic() - start
    return "no error", None, None, "", time.monotonic() - start

"""The launcher of ranks: results, failures with rank and traceback, and nothing left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from vllm_moe_modular.testing import ranks
from vllm_moe_modular.testing.ranks import Function, Here, RankFailedError, Ranks


def add_up(here: Here, x: float) -> tuple[float, bool, str, int]:
    t = torch.tensor(x * (here.rank + 1))
    dist.all_reduce(t)
    return t.item(), bool(torch.empty(1).isnan()), os.environ["OMP_NUM_THREADS"], os.getpid()


def fail_on(here: Here, rank: int) -> None:
    if here.rank == rank:
        raise LookupError(f"where is {rank}?")


def end_on(here: Here, rank: int) -> int:
    if here.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return here.rank


def sleep_on(here: Here, rank: int) -> None:
    if here.rank == rank:
        time.sleep(100)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_life_of_ranks() -> None:
    """One start for what needs no new ranks: results, a failure, a death that was expected, none left."""
    with Ranks(2) as ranks:
        (total, poisoned, threads, pid), (other, *_) = ranks.run(add_up, 1.5, timeout_s=60)
        assert total == other == 4.5
        assert poisoned
        assert threads == "1"
        assert ranks.run(add_up, 1.0, timeout_s=60)[0][3] == pid, "the ranks stay up between calls"
        assert ranks.run(end_on, 1, timeout_s=60, dying=[1]) == [0, None]
    assert not alive(pid)


@pytest.mark.parametrize(
    ("fn", "timeout_s", "message"),
    [
        (fail_on, 60, r"rank 1 raised:\n(.|\n)*in fail_on(.|\n)*LookupError: where is 1\?"),
        (end_on, 60, r"rank 1 ended \(SIGKILL\) before it answered"),
        (sleep_on, 1, r"ranks \[1\] were not done within 1 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_failure_names_the_rank(fn: Function, timeout_s: float, message: str) -> None:
    with Ranks(2) as ranks, pytest.raises(RankFailedError, match=message):
        ranks.run(fn, 1, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("shared", "told", "backend"),
    [(False, None, "nccl"), (True, None, "gloo"), (True, "0", "gloo"), (True, "1", "nccl")],
    ids=["a device each", "shared", "shared, NCCL may not", "shared, NCCL may"],
)
def test_what_ranks_on_cuda_meet_over(
    shared: bool, told: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "shares_devices", lambda _: shared)
    monkeypatch.delenv(ranks.NCCL_ON_SHARED, raising=False)
    if told is not None:
        monkeypatch.setenv(ranks.NCCL_ON_SHARED, told)
    assert ranks.cuda_ranks(2)._backend == backend

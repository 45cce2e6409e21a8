"""The `nvlink` kernels with all ranks in one process, rank after rank in an order in which nobody has to wait.

What lies where, who sends what to whom, and what is left alone; `test_nvlink_protocol` is about the order of things.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from benchmarks.nvlink_stress import make_slots, stress
from tests.kernels.common import DEVICE, DTYPES, poisoned, randn
from vllm_moe_modular.kernels import nvlink_combine, nvlink_dispatch, nvlink_memory
from vllm_moe_modular.kernels.nvlink_memory import MAX_PROGRAMS, NvlinkShape, NvlinkSlot
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

H, K, G = 96, 2, 6
TIMEOUT_NS = 10**9


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs and short chunks, so that few tokens do what many do on a GPU."""
    for module in (nvlink_memory, nvlink_dispatch, nvlink_combine):
        monkeypatch.setattr(module, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(nvlink_combine, "CHUNK_BYTES", 1024)


@dataclass
class Tokens:
    """Of one rank in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def make_ranks(
    W: int, capacity: int, dtype: torch.dtype, *, hidden: int = H, fp8_rows: bool = False
) -> list[NvlinkSlot]:
    """One slot per rank, its peers the buffers of the others."""
    shape = NvlinkShape(
        ranks=W, capacity_tokens=capacity, top_k=K, hidden=hidden, dtype=dtype, fp8_rows=fp8_rows
    )  # fmt: skip
    slots = make_slots(W, shape, DEVICE)
    for slot in slots:
        slot.rows.view(torch.uint8).fill_(0xFF)  # NaN, of whatever dtype
        if slot.row_scales is not None:
            slot.row_scales.fill_(float("nan"))
        slot.partials.fill_(float("nan"))
        slot.row_ids.fill_(2**30)
        slot.row_weights.fill_(float("nan"))
    return slots


def random_tokens(T: int, dtype: torch.dtype, seed: int, *, hidden: int = H) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, G, generator=g).topk(K).indices.int()
    ids[torch.rand(T, K, generator=g) < 0.2] = -1
    return Tokens(
        randn(T, hidden, dtype=dtype, seed=seed), ids.to(DEVICE), torch.rand(T, K, generator=g).to(DEVICE)
    )  # fmt: skip


def home_table(placement: ExpertPlacement) -> torch.Tensor:
    pairs = zip(placement.rank_of, placement.local_id_of, strict=True)
    homes = [rank << nvlink_dispatch.HOME_SHIFT | local for rank, local in pairs]
    return torch.tensor(homes, dtype=torch.int32, device=DEVICE)


def dispatch(slots: list[NvlinkSlot], tokens: list[Tokens], placement: ExpertPlacement, N: int) -> None:
    for slot, t in zip(slots, tokens, strict=True):
        nvlink_dispatch.nvlink_dispatch(
            slot, t.x, t.ids, t.weights, home_table(placement),
            rows_per_rank=N, timeout_ns=TIMEOUT_NS, wait=False,
        )  # fmt: skip


def combine(slots: list[NvlinkSlot], ys: list[torch.Tensor], outs: list[torch.Tensor], N: int) -> None:
    for halves in ("send", "add"):
        for slot, y, out in zip(slots, ys, outs, strict=True):
            nvlink_combine.nvlink_combine(
                slot, y, rows_per_rank=N, timeout_ns=TIMEOUT_NS, out_TH=out, halves=halves
            )  # fmt: skip


def check_dispatched(slots: list[NvlinkSlot], tokens: list[Tokens], placement: ExpertPlacement, N: int) -> None:
    """Bit by bit, with loops."""
    for slot in slots:
        for w, sent in enumerate(tokens):
            for t in range(N):
                row = w * N + t
                ids = sent.ids[t].tolist() if t < len(sent.x) else [-1] * K
                local = [
                    placement.local_id_of[g] if 0 <= g < G and placement.rank_of[g] == slot.rank else -1 for g in ids
                ]
                assert slot.row_ids[row].tolist() == local
                for k in range(K):
                    if local[k] >= 0:
                        assert slot.row_weights[row, k] == sent.weights[t, k]
                if max(local) >= 0:
                    assert torch.equal(slot.rows[row], sent.x[t])


def expert_rows(slot: NvlinkSlot, N: int) -> torch.Tensor:
    """Any function of row and rank will do; NaN where there is no expert."""
    rows = slot.rows[: slot.shape.ranks * N]
    here = slot.row_ids[: len(rows)].amax(1, keepdim=True) >= 0
    return torch.where(here, rows * (slot.rank + 1.5), float("nan"))


def check_combined(
    tokens: list[Tokens], outs: list[torch.Tensor], placement: ExpertPlacement, dtype: torch.dtype
) -> None:
    for sent, out in zip(tokens, outs, strict=True):
        truth = torch.zeros(sent.x.shape, dtype=torch.float64, device=DEVICE)
        naive = torch.zeros(sent.x.shape, dtype=dtype, device=DEVICE)
        for t in range(len(sent.x)):
            for w in sorted({placement.rank_of[g] for g in sent.ids[t].tolist() if 0 <= g < G}):
                share = sent.x[t] * (w + 1.5)
                truth[t] += share.double()
                naive[t] += share
        assert_as_accurate_as(out, naive, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("counts", "N"),
    [
        pytest.param([3], 3, id="one rank"),
        pytest.param([5, 5], 5, id="two ranks"),
        pytest.param([4, 0], 4, id="a rank without tokens"),
        pytest.param([2, 7, 3], 9, id="three ragged ranks, all short of the announced number"),
        pytest.param([0, 0], 1, id="no tokens anywhere"),
        pytest.param([20, 17], 20, id="several chunks per program"),
    ],
)
@pytest.mark.usefixtures("small")
def test_there_and_back(counts: list[int], N: int, dtype: torch.dtype) -> None:
    W = len(counts)
    slots, placement = make_ranks(W, max(N, 9), dtype), ExpertPlacement.linear(G, W)
    for step in range(2):  # the second one finds the leftovers of the first
        tokens = [random_tokens(T, dtype, seed=10 * step + w) for w, T in enumerate(counts)]
        dispatch(slots, tokens, placement, N)
        check_dispatched(slots, tokens, placement, N)
        outs = [poisoned(T, H, dtype=dtype) for T in counts]
        combine(slots, [expert_rows(slot, N) for slot in slots], outs, N)
        check_combined(tokens, outs, placement, dtype)


@pytest.mark.usefixtures("small")
def test_steps_of_different_sizes_follow_each_other() -> None:
    slots, placement = make_ranks(3, 20, torch.float32), ExpertPlacement.linear(G, 3)
    for step, counts in enumerate([[20, 1, 3], [1, 1, 0], [0, 6, 2]]):
        N = max(counts)
        tokens = [random_tokens(T, torch.float32, seed=10 * step + w) for w, T in enumerate(counts)]
        dispatch(slots, tokens, placement, N)
        check_dispatched(slots, tokens, placement, N)
        outs = [poisoned(T, H, dtype=torch.float32) for T in counts]
        combine(slots, [expert_rows(slot, N) for slot in slots], outs, N)
        check_combined(tokens, outs, placement, torch.float32)


def test_placement_need_not_be_linear() -> None:
    placement = ExpertPlacement.from_expert_maps([[0, -1, 1, -1, -1, 2], [-1, 2, -1, 0, 1, -1]])
    slots, tokens = make_ranks(2, 9, torch.float32), [random_tokens(9, torch.float32, seed=w) for w in range(2)]
    dispatch(slots, tokens, placement, 9)
    check_dispatched(slots, tokens, placement, 9)


def test_what_goes_nowhere_is_not_read_or_sent() -> None:
    slots, placement = make_ranks(2, 4, torch.float32), ExpertPlacement.linear(G, 2)
    tokens = [random_tokens(4, torch.float32, seed=w) for w in range(2)]
    tokens[0].ids[:] = torch.tensor([[-1, -1], [G, 2**20], [0, -1], [-5, 5]], dtype=torch.int32)
    dispatch(slots, tokens, placement, 4)
    check_dispatched(slots, tokens, placement, 4)
    assert slots[1].rows[:3].isnan().all()
    assert slots[0].rows[[0, 1, 3]].isnan().all()
    outs = [poisoned(4, H, dtype=torch.float32) for _ in range(2)]
    combine(slots, [expert_rows(slot, 4) for slot in slots], outs, 4)
    assert not outs[0][:2].any()
    check_combined(tokens, outs, placement, torch.float32)


def test_ids_may_be_64_bit() -> None:
    slots, placement = make_ranks(2, 4, torch.float32), ExpertPlacement.linear(G, 2)
    tokens = [random_tokens(4, torch.float32, seed=w) for w in range(2)]
    for t in tokens:
        t.ids = t.ids.long()
    dispatch(slots, tokens, placement, 4)
    check_dispatched(slots, tokens, placement, 4)


@pytest.mark.usefixtures("small")
def test_counters_wrap() -> None:
    slots, placement = make_ranks(2, 20, torch.float32), ExpertPlacement.linear(G, 2)
    for slot in slots:
        slot.counters.fill_(2**31 - 2)
        slot.flags.fill_(2**31 - 2)
    for step in range(3):
        tokens = [random_tokens(20, torch.float32, seed=10 * step + w) for w in range(2)]
        dispatch(slots, tokens, placement, 20)
        outs = [poisoned(20, H, dtype=torch.float32) for _ in range(2)]
        combine(slots, [expert_rows(slot, 20) for slot in slots], outs, 20)
        check_combined(tokens, outs, placement, torch.float32)
    assert (slots[0].counters[0] == -(2**31) + 1).all()
    assert torch.equal(slots[0].flags[0, 1], slots[1].counters[0])
    assert torch.equal(slots[0].flags[1, 1], slots[1].counters[1])
    assert torch.equal(slots[0].counters[1], slots[0].counters[2])


@pytest.mark.parametrize("row_bytes", [32, 4096, 5760, 14336])
@pytest.mark.parametrize("rows", [1, 2, 64, 128, 129, 4096, 8192])
def test_tiles(rows: int, row_bytes: int) -> None:
    there, back = nvlink_dispatch.choose_tile(rows, row_bytes), nvlink_combine.choose_tile(rows, row_bytes)
    for tile in (there, back):
        assert 1 <= tile.programs <= min(rows, MAX_PROGRAMS)
        assert tile.tile_rows.bit_count() == 1
        # Half of a multiprocessor's threads for what waits: see the order in `nvlink_dispatch`.
        assert tile.num_warps * 32 <= 1024
    assert back.chunk_rows % back.tile_rows == 0


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["as they are", "fp8"])
def test_ranks_that_run_at_the_same_time_on_one_gpu(fp8: bool) -> None:
    """The same over 100,000 steps: python -m benchmarks.nvlink_stress."""
    stress(2, 1000, seed=random.randrange(10**9), fp8=fp8)

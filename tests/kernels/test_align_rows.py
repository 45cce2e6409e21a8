"""kernels.align_rows against its reference, then against each property that has a name."""

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, random_ids
from vllm_moe_modular.kernels import align_rows as module
from vllm_moe_modular.kernels.align_rows import Tile, align_rows, choose_tile, max_blocks, scratch_ints
from vllm_moe_modular.reference.align_rows import align_rows as reference


def run(ids: torch.Tensor, num_experts: int, block_rows: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    scratch = poisoned(scratch_ints(ids.numel(), num_experts, block_rows), dtype=torch.int32)
    rows = align_rows(ids, num_experts, block_rows, scratch=scratch)
    blocks = [tuple(b[:3]) for b in rows.blocks[: int(rows.totals[0])].tolist()]
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    for expert, start, count in blocks:
        groups[expert] += rows.sorted_slots[start : start + count].tolist()
    return [sorted(g) for g in groups], blocks


@pytest.mark.parametrize("launches", ["one launch", "three launches"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("R", "K", "E", "block_rows"),
    [
        pytest.param(1, 1, 1, 16, id="one slot"),
        pytest.param(100, 3, 12, 16, id="top 3 of 12"),
        pytest.param(65, 8, 128, 32, id="more experts than rows each"),
        pytest.param(150, 1, 2, 64, id="blocks that fill up"),
    ],
)
def test_matches_reference(
    R: int, K: int, E: int, block_rows: int, dtype: torch.dtype, launches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launches == "three launches":
        monkeypatch.setattr(module, "choose_tile", lambda _: Tile(32, False, 4))
    ids = random_ids(R, K, E).to(dtype)
    assert run(ids, E, block_rows) == reference(ids, E, block_rows)


@pytest.mark.parametrize("launches", ["one launch", "three launches"])
def test_ids_that_are_not_here_are_in_no_block(launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if launches == "three launches":
        monkeypatch.setattr(module, "choose_tile", lambda _: Tile(32, False, 4))
    ids = random_ids(30, 4, 8)
    ids[3], ids[7, 1], ids[9, 0], ids[10, 2] = -1, -1, 8, 2**31 - 1
    assert run(ids, 8, 16) == reference(ids, 8, 16)


def test_no_slot_is_here() -> None:
    groups, blocks = run(torch.full((5, 2), -1, dtype=torch.int32, device=DEVICE), 4, 16)
    assert blocks == []
    assert groups == [[]] * 4


def test_all_slots_of_one_expert() -> None:
    ids = torch.full((70, 1), 3, dtype=torch.int32, device=DEVICE)
    assert run(ids, 4, 16) == reference(ids, 4, 16)


@pytest.mark.parametrize(("slots", "experts", "block_rows"), [(1, 128, 16), (64, 128, 16), (100, 3, 16), (512, 8, 64)])
def test_table_of_blocks_is_large_enough(slots: int, experts: int, block_rows: int) -> None:
    """The worst case: every expert but one has a single row."""
    used = min(experts, slots)
    worst = used - 1 + -(-(slots - used + 1) // block_rows)
    assert worst <= max_blocks(slots, experts, block_rows) <= slots


@pytest.mark.parametrize("slots", [1, 33, 4096, 8193, 2**20])
def test_one_launch_holds_all_slots(slots: int) -> None:
    tile = choose_tile(slots)
    assert tile.block_s.bit_count() == 1
    assert not tile.one_launch or tile.block_s >= slots


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "E"), [(1024, 128), (8192, 128), (16384, 384)])
def test_full_size(R: int, E: int) -> None:
    """Against torch's counts: the reference would take minutes."""
    ids = torch.rand(R, E, device=DEVICE).topk(8).indices.int()
    rows = align_rows(ids, E, 128, scratch=poisoned(scratch_ints(R * 8, E, 128), dtype=torch.int32))
    assert torch.equal(rows.sorted_slots.sort().values.long(), torch.arange(R * 8, device=DEVICE))
    assert torch.equal(ids.flatten()[rows.sorted_slots.long()], ids.flatten().sort().values)
    counts = ids.flatten().bincount(minlength=E)
    assert rows.totals.tolist() == [int((counts + 127).div(128, rounding_mode="floor").sum()), R * 8]
    blocks = rows.blocks[: int(rows.totals[0])].long()
    assert torch.equal(torch.zeros_like(counts).index_add_(0, blocks[:, 0], blocks[:, 2]), counts)

"""kernels.place_rows against its reference, then against each property that has a name."""

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, random_ids
from vllm_moe_modular.kernels import place_rows as module
from vllm_moe_modular.kernels.place_rows import max_placed_rows, place_rows, scratch_ints
from vllm_moe_modular.reference.place_rows import place_rows as reference


def check(ids: torch.Tensor, num_experts: int, alignment: int) -> None:
    """Ends are the reference's, and each expert's slots are where it has them, in any order."""
    scratch = poisoned(scratch_ints(ids.numel(), num_experts), dtype=torch.int32)
    placed = place_rows(ids, num_experts, alignment, scratch=scratch)
    positions, ends = reference(ids, num_experts, alignment)
    assert placed.ends.tolist() == ends
    got = placed.positions.tolist()
    by_expert = [[p for p, i in zip(ps, ids.flatten().tolist(), strict=True) if i == e]
                 for ps in (got, positions) for e in range(num_experts)]  # fmt: skip
    assert list(map(sorted, by_expert[:num_experts])) == by_expert[num_experts:]
    assert [p == -1 for p in got] == [p == -1 for p in positions]
    assert max(got) < max_placed_rows(ids.numel(), num_experts, alignment)


@pytest.mark.parametrize("chunk", [32, 1024], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("R", "K", "E", "alignment"),
    [
        pytest.param(1, 1, 1, 16, id="one slot"),
        pytest.param(100, 3, 12, 16, id="top 3 of 12"),
        pytest.param(65, 8, 128, 128, id="experts without a row"),
        pytest.param(96, 1, 2, 16, id="blocks that fill up"),
    ],
)
def test_matches_reference(
    R: int, K: int, E: int, alignment: int, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_SLOTS", chunk)
    check(random_ids(R, K, E).to(dtype), E, alignment)


def test_ids_that_are_not_here_have_no_row() -> None:
    ids = random_ids(30, 4, 8)
    ids[3], ids[7, 1], ids[9, 0], ids[10, 2] = -1, -1, 8, 2**31 - 1
    check(ids, 8, 16)


def test_no_slot_is_here() -> None:
    check(torch.full((5, 2), -1, dtype=torch.int32, device=DEVICE), 4, 16)


def test_an_expert_twice_in_a_row() -> None:
    check(torch.full((40, 2), 3, dtype=torch.int32, device=DEVICE), 4, 16)


@pytest.mark.parametrize(("slots", "experts"), [(1, 128), (64, 128), (100, 3), (65536, 128)])
def test_the_layout_is_large_enough(slots: int, experts: int) -> None:
    """The worst case: every expert has one row more than whole blocks, as far as the slots go."""
    used = min(slots, experts)
    blocks, rest = divmod(slots - used, 128)
    worst = (used + blocks + (rest > 0 and used == 0)) * 128
    assert worst <= max_placed_rows(slots, experts, 128)
    assert max_placed_rows(slots, experts, 128) % 128 == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "E"), [(1024, 128), (8192, 128), (16384, 384)])
def test_full_size(R: int, E: int) -> None:
    """Against torch's counts: the reference would take minutes."""
    ids = torch.rand(R, E, device=DEVICE).topk(8).indices.int()
    placed = place_rows(ids, E, 128, scratch=poisoned(scratch_ints(R * 8, E), dtype=torch.int32))
    counts = ids.flatten().bincount(minlength=E)
    padded = (counts + 127) // 128 * 128
    starts = padded.cumsum(0) - padded
    assert torch.equal(placed.ends.long(), starts + counts)
    positions = placed.positions.long()
    assert positions.unique().numel() == R * 8
    of_slot = ids.flatten().long()
    assert ((positions >= starts[of_slot]) & (positions < (starts + counts)[of_slot])).all()

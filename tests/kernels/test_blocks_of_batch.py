"""kernels.blocks_of_batch against its reference."""

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.reference.blocks_of_batch import blocks_of_batch as reference


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("counts", "capacity", "block_rows"),
    [
        pytest.param([5], 8, 16, id="one expert"),
        pytest.param([0, 17, 16, 0, 1, 40], 40, 16, id="empty, full and ragged"),
        pytest.param([0, 0, 0], 8, 16, id="nobody has rows"),
        pytest.param([3, 99, -7, 8], 8, 16, id="counts past the capacity, and below 0"),
        pytest.param([7 * e % 65 for e in range(130)], 64, 32, id="more experts than a power of two"),
    ],
)
def test_matches_reference(counts: list[int], capacity: int, block_rows: int, dtype: torch.dtype) -> None:
    scratch = poisoned(batch_scratch_ints(len(counts), capacity, block_rows), dtype=torch.int32)
    got = blocks_of_batch(torch.tensor(counts, dtype=dtype, device=DEVICE), capacity, block_rows, scratch=scratch)
    expected = reference(counts, capacity, block_rows)
    assert got.totals.tolist() == [len(expected), sum(rows for _, _, rows in expected)]
    assert [tuple(b[:3]) for b in got.blocks[: len(expected)].tolist()] == expected
    assert got.sorted_slots is None

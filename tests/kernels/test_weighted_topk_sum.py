"""kernels.weighted_topk_sum against its reference, then against each property that has a name."""

import pytest
import torch

from tests.kernels.common import DTYPES, poisoned, randn, random_ids
from vllm_moe_modular.kernels.weighted_topk_sum import choose_tile, weighted_topk_sum
from vllm_moe_modular.reference.weighted_topk_sum import weighted_topk_sum as reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize(
    ("R", "K", "H"),
    [
        pytest.param(1, 1, 16, id="one row"),
        pytest.param(5, 3, 96, id="hidden not a power of two"),
        pytest.param(3, 8, 1536, id="hidden wider than a tile"),
    ],
)
def test_matches_reference(R: int, K: int, H: int, weighted: bool, dtype: torch.dtype) -> None:
    y, ids = randn(R * K, H, dtype=dtype), random_ids(R, K, 8)
    weights = randn(R, K, dtype=torch.float32, seed=1).abs() if weighted else None
    out = poisoned(R, H, dtype=dtype)
    weighted_topk_sum(y, ids, weights, num_experts=8, out_RH=out)
    naive, truth = (reference(y.to(d), ids, weights, num_experts=8) for d in (dtype, torch.float64))
    assert_as_accurate_as(out, naive, truth)


def test_what_is_not_here_is_not_read() -> None:
    y, ids, weights = randn(8, 32, dtype=torch.float32), random_ids(4, 2, 8), torch.ones(4, 2)
    weights = weights.to(y.device)
    ids[0, 1], ids[1], ids[2, 0] = -1, -1, 8
    for slot in (1, 2, 3, 4):
        y[slot], weights[slot // 2, slot % 2] = float("nan"), float("nan")
    out = poisoned(4, 32, dtype=torch.float32)
    weighted_topk_sum(y, ids, weights, num_experts=8, out_RH=out)
    assert torch.equal(out[0], y[0])
    assert not out[1].any()
    assert torch.equal(out[2], y[5])


@pytest.mark.parametrize("hidden", [1, 96, 1024, 7168])
@pytest.mark.parametrize("rows", [1, 4096])
def test_tile_is_a_power_of_two(rows: int, hidden: int) -> None:
    assert choose_tile(rows, hidden).block_h.bit_count() == 1

"""kernels.small_batch_gated and small_batch_down against their references."""

from dataclasses import asdict
from functools import partial

import pytest
import torch

from tests.kernels.common import DTYPES, poisoned, randn, random_ids
from vllm_moe_modular.kernels.gated_activation import NAMES, GatedActivation
from vllm_moe_modular.kernels.small_batch_down import small_batch_down
from vllm_moe_modular.kernels.small_batch_gated import small_batch_gated
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.small_batch_down import small_batch_down as down_reference
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated as gated_reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SHAPES = [
    pytest.param(1, 8, 16, 64, 32, id="one row, top 8"),
    pytest.param(3, 3, 12, 40, 22, id="top 3 of 12, nothing even"),
    pytest.param(2, 1, 2, 300, 600, id="wider than a tile"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.parametrize(
    ("R", "K", "E", "H", "F", "name"),
    [pytest.param(*shape.values, "silu", id=str(shape.id)) for shape in SHAPES]
    + [pytest.param(1, 2, 4, 32, 16, name, id=name) for name in NAMES],
)
def test_gated_matches_reference(
    R: int, K: int, E: int, H: int, F: int, name: str, interleaved: bool, dtype: torch.dtype
) -> None:
    activation = GatedActivation(name, limit=2.0 if interleaved else None, interleaved=interleaved)
    ids = random_ids(R, K, E)
    ids[-1, -1] = -1
    x, w13 = randn(R, H, dtype=dtype), randn(E, 2 * F, H, dtype=dtype, seed=1) / 8
    bias = randn(E, 2 * F, dtype=dtype, seed=2) if interleaved else None
    weights = randn(R, K, dtype=torch.float32, seed=3).abs() if interleaved else None
    out = poisoned(R * K, F, dtype=dtype)
    small_batch_gated(x, w13, ids, out_SF=out, activation=activation, bias=bias, topk_weights_RK=weights)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        return gated_reference(
            x.to(dtype), w13.to(dtype), ids, activation=partial(gated_activation, **asdict(activation)),
            bias=None if bias is None else bias.to(dtype), topk_weights_RK=weights,
        )  # fmt: skip

    assert out[-1].isnan().all(), "a slot that is not here was written"
    assert_as_accurate_as(out[:-1], reference(dtype)[:-1], reference(torch.float64)[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize(("R", "K", "E", "H", "F"), SHAPES)
def test_down_matches_reference(R: int, K: int, E: int, H: int, F: int, weighted: bool, dtype: torch.dtype) -> None:
    ids = random_ids(R, K, E)
    x, w2 = randn(R * K, F, dtype=dtype), randn(E, H, F, dtype=dtype, seed=1) / 8
    weights = randn(R, K, dtype=torch.float32, seed=3).abs()
    ids[-1, -1], x[-1], weights[-1, -1] = E, float("nan"), float("nan")
    bias = randn(E, H, dtype=dtype, seed=2)
    out = poisoned(R, H, dtype=dtype)
    small_batch_down(x, w2, ids, weights if weighted else None, out_RH=out, bias=bias)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        return down_reference(x.to(dtype), w2.to(dtype), ids, weights if weighted else None, bias=bias.to(dtype))

    assert_as_accurate_as(out, reference(dtype), reference(torch.float64))

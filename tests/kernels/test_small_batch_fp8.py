"""kernels.small_batch_gated and small_batch_down with weights in fp8."""

from dataclasses import asdict
from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, randn, random_fp8_weights, random_ids, stand_for
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.kernels.small_batch_down import small_batch_down
from vllm_moe_modular.kernels.small_batch_gated import Tile, small_batch_gated
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.small_batch_down import small_batch_down as down_reference
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated as gated_reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

# The interpreter's time is that of its programs: few dtypes, wide tiles.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
GATED_TILE = None if DEVICE.type == "cuda" else Tile(block_f=16, block_h=256, num_warps=4, num_stages=2)

SHAPES = [
    pytest.param(1, 2, 4, 384, 256, True, id="blocks"),
    pytest.param(2, 3, 12, 200, 128, True, id="blocks, top 3 of 12, last one of depth partial"),
    pytest.param(1, 8, 16, 64, 32, False, id="channels, top 8"),
    pytest.param(3, 3, 12, 40, 22, False, id="channels, top 3 of 12, nothing even"),
]
GATED = [
    *SHAPES,
    pytest.param(2, 1, 2, 1300, 128, True, id="blocks, deeper than a tile"),
    pytest.param(2, 1, 2, 1300, 12, False, id="channels, deeper than a tile"),
]
DOWN = [
    *SHAPES,
    pytest.param(1, 8, 16, 136, 640, True, id="blocks, deeper than a tile"),
    pytest.param(1, 8, 16, 12, 640, False, id="channels, deeper than a tile"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["packed", "interleaved"])
@pytest.mark.parametrize(("R", "K", "E", "H", "F", "blocks"), GATED)
def test_gated_matches_reference(
    R: int, K: int, E: int, H: int, F: int, blocks: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    activation = GatedActivation("silu", interleaved=interleaved and not blocks)
    ids = random_ids(R, K, E)
    ids[-1, -1] = -1
    x = randn(R, H, dtype=dtype)
    w13, scale = random_fp8_weights(E, 2 * F, H, blocks=blocks, seed=1)
    bias = randn(E, 2 * F, dtype=dtype, seed=2) if interleaved else None
    weights = randn(R, K, dtype=torch.float32, seed=3).abs() if interleaved else None
    out = poisoned(R * K, F, dtype=dtype)
    small_batch_gated(
        x, w13, ids, out_SF=out, activation=activation, scale=scale, bias=bias, topk_weights_RK=weights, tile=GATED_TILE
    )

    def reference(dtype: torch.dtype) -> torch.Tensor:
        return gated_reference(
            x.to(dtype), stand_for(w13, scale, dtype), ids, activation=partial(gated_activation, **asdict(activation)),
            bias=None if bias is None else bias.to(dtype), topk_weights_RK=weights,
        )  # fmt: skip

    assert out[-1].isnan().all(), "a slot that is not here was written"
    assert_as_accurate_as(out[:-1], reference(dtype)[:-1], reference(torch.float64)[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize(("R", "K", "E", "H", "F", "blocks"), DOWN)
def test_down_matches_reference(
    R: int, K: int, E: int, H: int, F: int, blocks: bool, weighted: bool, dtype: torch.dtype
) -> None:
    ids = random_ids(R, K, E)
    x = randn(R * K, F, dtype=dtype)
    w2, scale = random_fp8_weights(E, H, F, blocks=blocks, seed=1)
    weights = randn(R, K, dtype=torch.float32, seed=3).abs()
    ids[-1, -1], x[-1], weights[-1, -1] = E, float("nan"), float("nan")
    bias = randn(E, H, dtype=dtype, seed=2)
    out = poisoned(R, H, dtype=dtype)
    small_batch_down(x, w2, ids, weights if weighted else None, out_RH=out, scale=scale, bias=bias)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        w = stand_for(w2, scale, dtype)
        return down_reference(x.to(dtype), w, ids, weights if weighted else None, bias=bias.to(dtype))

    assert_as_accurate_as(out, reference(dtype), reference(torch.float64))

"""The `nvlink` kernels with rows in fp8: the bits of quantising first and sending then; what comes home is not in fp8.

All ranks in one process, as in `test_nvlink_kernels`.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, poisoned_fp8_rows
from tests.kernels.interpreter import rounds_to_nearest  # noqa: F401
from tests.kernels.test_nvlink_kernels import (
    G,
    Tokens,
    check_combined,
    combine,
    dispatch,
    make_ranks,
    random_tokens,
    small,  # noqa: F401
)
from vllm_moe_modular.kernels.nvlink_memory import NvlinkShape, NvlinkSlot
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8

COUNTS = [
    pytest.param([3], 3, 256, id="one rank"),
    pytest.param([2, 7, 3], 9, 384, id="three ragged ranks, all short of the announced number"),
    pytest.param([20, 0], 20, 128, id="several tiles per program, a rank without tokens"),
]


def quantised(x: torch.Tensor) -> Fp8Rows:
    out = poisoned_fp8_rows(*x.shape)
    if len(x):
        quantize_fp8(x, out=out)
    return out


def is_poison(slot: NvlinkSlot, row: int) -> bool:
    assert slot.row_scales is not None
    return bool((slot.rows[row].view(torch.uint8) == 0xFF).all() and slot.row_scales[row].isnan().all())


def check_rows(slots: list[NvlinkSlot], tokens: list[Tokens], placement: ExpertPlacement, N: int) -> None:
    """Bit by bit, with loops; what goes nowhere was not written."""
    for slot in slots:
        assert slot.row_scales is not None
        for w, sent in enumerate(tokens):
            want = quantised(sent.x)
            for t in range(N):
                row = w * N + t
                ids = sent.ids[t].tolist() if t < len(sent.x) else []
                if not any(0 <= g < G and placement.rank_of[g] == slot.rank for g in ids):
                    assert is_poison(slot, row)
                    continue
                assert torch.equal(slot.rows[row].view(torch.uint8), want.values[t].view(torch.uint8))
                assert torch.equal(slot.row_scales[row], want.scales[t])


def expert_rows(slot: NvlinkSlot, N: int) -> torch.Tensor:
    """What the rows stand for times a number of the rank; NaN where there is no expert."""
    R = slot.shape.ranks * N
    assert slot.row_scales is not None
    meant = dequantize_fp8(slot.rows[:R], slot.row_scales[:R]).to(slot.shape.dtype)
    here = slot.row_ids[:R].amax(1, keepdim=True) >= 0
    return torch.where(here, meant * (slot.rank + 1.5), float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("counts", "N", "hidden"), COUNTS)
@pytest.mark.usefixtures("small")
def test_there_and_back(counts: list[int], N: int, hidden: int, dtype: torch.dtype) -> None:
    W = len(counts)
    slots = make_ranks(W, max(N, 9), dtype, hidden=hidden, fp8_rows=True)
    placement = ExpertPlacement.linear(G, W)
    tokens = [random_tokens(T, dtype, seed=w, hidden=hidden) for w, T in enumerate(counts)]
    dispatch(slots, tokens, placement, N)
    check_rows(slots, tokens, placement, N)
    outs = [poisoned(T, hidden, dtype=dtype) for T in counts]
    combine(slots, [expert_rows(slot, N) for slot in slots], outs, N)
    as_sent = [replace(t, x=dequantize_fp8(*_pair(quantised(t.x))).to(dtype)) for t in tokens]
    check_combined(as_sent, outs, placement, dtype)


def _pair(rows: Fp8Rows) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.values, rows.scales


def test_numbers_of_every_size_in_a_row() -> None:
    """A scale for each 128 columns, of zeros and of numbers too small for one too; NaN stays in its group."""
    slots = make_ranks(2, 4, torch.float32, hidden=512, fp8_rows=True)
    tokens = [random_tokens(4, torch.float32, seed=w, hidden=512) for w in range(2)]
    for t in tokens:
        t.ids[:] = torch.tensor([0, G - 1], dtype=torch.int32, device=DEVICE)  # one on each rank
        t.x[:, :128] *= 1e30
        t.x[:, 128:256], t.x[1, 256:384], t.x[2, 300] = 0.0, 1e-38, float("nan")
    dispatch(slots, tokens, ExpertPlacement.linear(G, 2), 4)
    for slot in slots:
        for w, sent in enumerate(tokens):
            want = quantised(sent.x)
            assert torch.equal(slot.rows[4 * w : 4 * w + 4].view(torch.uint8), want.values.view(torch.uint8))
            assert slot.row_scales is not None
            assert torch.equal(slot.row_scales[4 * w : 4 * w + 4], want.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [7168, 2944], ids=["DeepSeek-V3", "23 groups"])
@pytest.mark.parametrize("N", [1, 100, 300], ids=["one token", "fewer than programs", "several tiles per program"])
def test_every_tile_of_a_large_step(hidden: int, N: int) -> None:
    slots = make_ranks(2, 300, torch.bfloat16, hidden=hidden, fp8_rows=True)
    placement = ExpertPlacement.linear(G, 2)
    tokens = [random_tokens(T, torch.bfloat16, seed=T, hidden=hidden) for T in (N, N // 2)]
    dispatch(slots, tokens, placement, N)
    check_rows(slots, tokens, placement, N)


def test_a_slot_takes_about_half_the_memory_for_rows() -> None:
    plain = NvlinkShape(ranks=2, capacity_tokens=4096, top_k=8, hidden=7168, dtype=torch.bfloat16)
    fp8 = replace(plain, fp8_rows=True)
    rows = 2 * 4096 * 7168
    assert plain.slot_bytes - fp8.slot_bytes == rows * 2 - rows - rows // 128 * 4
    assert plain != fp8, "layers of both kinds would share buffers"

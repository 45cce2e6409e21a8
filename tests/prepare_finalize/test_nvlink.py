"""`nvlink` over one rank, which has nobody to wait for: the part around the kernels, without a GPU."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

import pytest

from tests.kernels.common import random_fp8_weights
from vllm_moe_modular.errors import CapacityError, MoEModularError, RankLostError, ShapeError, UnsupportedError
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.nvlink_memory import Failure, NvlinkShape, make_slot, unpack_failure
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized_rows
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize import nvlink
from vllm_moe_modular.prepare_finalize.nvlink import NvlinkBuffers, NvlinkPrepareAndFinalize, NvlinkTicket

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = NvlinkShape(ranks=1, capacity_tokens=4, top_k=2, hidden=16, dtype=torch.float32)


def buffers_of(shape: NvlinkShape) -> NvlinkBuffers:
    failure = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    host_failure = torch.zeros(1, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    peers = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    memory = torch.zeros(2, shape.slot_bytes, dtype=torch.uint8, device=DEVICE)
    return NvlinkBuffers(
        [
            make_slot(shape, part, rank=0, peers=peers, failure=failure, host_failure=host_failure)
            for part in memory.unbind()
        ]
    )  # fmt: skip


@pytest.fixture
def buffers() -> NvlinkBuffers:
    return buffers_of(SHAPE)


@pytest.fixture
def part(buffers: NvlinkBuffers) -> NvlinkPrepareAndFinalize:
    return NvlinkPrepareAndFinalize(buffers=buffers, placement=ExpertPlacement.linear(3, 1), timeout_s=1.0)


def prepare(part: NvlinkPrepareAndFinalize, x: torch.Tensor, *, at_most: int = 4) -> Dispatched[NvlinkTicket]:
    ids = torch.tensor([0, 2], dtype=torch.int32, device=x.device).repeat(len(x), 1)
    weights = torch.ones(len(x), 2, device=x.device)
    return part.prepare(x, ids, weights, max_tokens_per_rank=at_most, router_weight_on_input=False)


def rows_of(T: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(T, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def finalized(part: NvlinkPrepareAndFinalize, done: Dispatched[NvlinkTicket], T: int) -> torch.Tensor:
    assert isinstance(done.rows, StandardRows)
    out = torch.empty(T, 16, device=DEVICE)
    part.finalize(done.rows.x * 2, done.ticket, out_TH=out)
    return out


def test_rows_come_back(part: NvlinkPrepareAndFinalize) -> None:
    x = rows_of(3)
    done = prepare(part, x)
    assert isinstance(done.rows, StandardRows)
    assert done.rows.topk_ids.tolist() == [[0, 2]] * 3 + [[-1, -1]]
    assert torch.equal(finalized(part, done, 3), x * 2)


def test_rows_in_fp8_have_scales_and_come_back_in_the_dtype_of_the_tokens() -> None:
    buffers = buffers_of(replace(SHAPE, hidden=256, fp8_rows=True))
    part = NvlinkPrepareAndFinalize(buffers=buffers, placement=ExpertPlacement.linear(3, 1), timeout_s=1.0)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    done = prepare(part, x)
    assert isinstance(done.rows, StandardRows)
    assert done.rows.x.dtype == torch.float8_e4m3fn
    assert done.rows.x_scale is not None
    assert done.rows.x_scale.shape == (4, 2)
    y = dequantized_rows(done.rows.for_experts(ids_dtype=None, dtype=torch.float32))
    assert (y[:3] - x).abs().max() < x.abs().max() / 16
    out = torch.empty(3, 256, device=DEVICE)
    part.finalize(y, done.ticket, out_TH=out)
    assert torch.equal(out, y[:3])


def test_rows_in_fp8_of_a_hidden_size_that_128_does_not_divide_are_refused() -> None:
    shape = replace(SHAPE, hidden=200, fp8_rows=True)
    with pytest.raises(UnsupportedError, match=r"rows in fp8 of hidden size 200 .* takes multiples of 128"):
        NvlinkBuffers.reserve(SimpleNamespace(rank=lambda: 0), shape, DEVICE)  # type: ignore[arg-type]


def test_quantising_before_the_dispatch_gives_the_bits_of_quantising_after_it() -> None:
    T, K, E, H, F = 6, 2, 3, 256, 128
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    ids = torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1], [0, 1], [2, 0]], dtype=torch.int32, device=DEVICE)
    router = torch.rand(T, K, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    w13, w13_scale = random_fp8_weights(E, 2 * F, H, blocks=True, seed=2)
    w2, w2_scale = random_fp8_weights(E, H, F, blocks=True, seed=3)
    weights = ExpertWeights(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
    outs = []
    for fp8_rows in (False, True):
        shape = NvlinkShape(1, 8, K, H, torch.float16, fp8_rows=fp8_rows)
        part = NvlinkPrepareAndFinalize(
            buffers=buffers_of(shape), placement=ExpertPlacement.linear(E, 1), timeout_s=1.0
        )  # fmt: skip
        workspace = Workspace(DEVICE)
        kernel = ModularKernel(part, TritonExperts(Activation(kind=ActivationKind.SILU)), allocate=workspace)
        bound = {"max_tokens_per_rank": 8, "top_k": K, "dtype": torch.float16}
        workspace.reserve(kernel.workspace_bytes(weights, **bound, fp8_rows=fp8_rows))
        workspace.lock()
        outs.append(kernel.apply(x, ids, router, weights, max_tokens_per_rank=8))
    assert outs[1].dtype == torch.float16
    assert torch.equal(*outs)


def test_two_calls_in_flight_do_not_mix_and_a_third_is_refused(part: NvlinkPrepareAndFinalize) -> None:
    a, b = rows_of(3, seed=1), rows_of(4, seed=2)
    first, second = prepare(part, a), prepare(part, b)
    with pytest.raises(MoEModularError, match="2 calls are in flight already"):
        prepare(part, a)
    assert torch.equal(finalized(part, second, 4), b * 2)
    assert torch.equal(finalized(part, first, 3), a * 2)
    assert prepare(part, a).ticket.slot == 0


def test_no_tokens_anywhere_still_takes_part(part: NvlinkPrepareAndFinalize, buffers: NvlinkBuffers) -> None:
    done = prepare(part, rows_of(0), at_most=0)
    assert isinstance(done.rows, StandardRows)
    assert done.rows.topk_ids.tolist() == [[-1, -1]]
    assert finalized(part, done, 0).shape == (0, 16)
    assert buffers.slots[0].counters[:, 0].tolist() == [1, 1, 1]


def test_an_output_need_not_be_contiguous(part: NvlinkPrepareAndFinalize) -> None:
    x = rows_of(3)
    done = prepare(part, x.T.contiguous().T)
    assert isinstance(done.rows, StandardRows)
    out = torch.empty(16, 3, device=DEVICE).T
    part.finalize(done.rows.x, done.ticket, out_TH=out)
    assert torch.equal(out, x)


def test_more_tokens_than_reserved(part: NvlinkPrepareAndFinalize) -> None:
    with pytest.raises(CapacityError, match=r"a step of 5 tokens per rank, 4 were reserved.*--max-num-batched-tokens"):
        prepare(part, rows_of(2), at_most=5)


def test_another_layer_than_reserved_for(part: NvlinkPrepareAndFinalize) -> None:
    with pytest.raises(ShapeError, match="H=16"):
        prepare(part, torch.zeros(2, 17, device=DEVICE))
    with pytest.raises(UnsupportedError, match=r"x_TH in torch.float16.*reserved for torch.float32"):
        prepare(part, rows_of(2).half())
    assert finalized(part, prepare(part, rows_of(2)), 2).shape == (2, 16)


def test_what_the_device_noted_is_raised_at_every_chance(
    part: NvlinkPrepareAndFinalize, buffers: NvlinkBuffers
) -> None:
    done = prepare(part, rows_of(2))
    buffers.slots[0].host_failure.fill_(2 << 48 | 3 << 32 | 1234)
    for _ in range(2):
        with pytest.raises(RankLostError, match="nothing came from rank 3 in the combine of step 1234 within 1 s"):
            finalized(part, done, 2)
        with pytest.raises(RankLostError, match="rank 3"):
            prepare(part, rows_of(2))


def test_notes_of_the_device() -> None:
    assert unpack_failure(0) is None
    assert unpack_failure(1 << 48 | 0x7FFFFFFF) == Failure("dispatch", 0, 2**31 - 1)


def test_a_capacity_of_no_tokens_holds_the_one_row_that_every_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "buffers_for", lambda group, shape, device: buffers_of(shape))  # noqa: ARG005
    context = BuildContext(
        device=DEVICE, dtype=torch.float32, placement=ExpertPlacement.linear(3, 1), rank=0,
        group=cast("RankGroup", SimpleNamespace(size=1, process_group=None, timeout_s=1.0)), hidden=16, top_k=2,
        capacity_tokens=0, activation=None, low_latency_tokens=256,
    )  # fmt: skip
    part = NvlinkPrepareAndFinalize.build(context)
    for step in range(2):
        done = prepare(part, rows_of(0), at_most=0)
        assert isinstance(done.rows, StandardRows), step
        assert done.rows.topk_ids.tolist() == [[-1, -1]]
        assert finalized(part, done, 0).shape == (0, 16)
    with pytest.raises(CapacityError, match="2 tokens per rank, 1 were reserved for"):
        prepare(part, rows_of(2), at_most=2)


def test_experts_that_raise_give_the_slot_back(part: NvlinkPrepareAndFinalize) -> None:
    """More often than there are slots: the reason stays the same."""
    full = Workspace(DEVICE)
    full.reserve(16)
    full.lock()
    kernel = ModularKernel(part, TritonExperts(Activation(kind=ActivationKind.SILU)), allocate=full)
    weights = ExpertWeights(w13=torch.ones(3, 8, 16, device=DEVICE), w2=torch.ones(3, 16, 4, device=DEVICE))
    ids, ones = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE), torch.ones(3, 2, device=DEVICE)
    for _ in range(nvlink.SLOTS + 1):
        with pytest.raises(CapacityError, match="were reserved at start-up"):
            kernel.apply(rows_of(3), ids, ones, weights, max_tokens_per_rank=3)


def test_a_dispatch_that_raises_gives_the_slot_back(
    part: NvlinkPrepareAndFinalize, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(nvlink, "nvlink_dispatch", fails)
    for _ in range(nvlink.SLOTS + 1):
        with pytest.raises(RuntimeError, match="no compiler"):
            prepare(part, rows_of(3))


def test_rows_that_come_back_where_they_lay_are_copied_first(
    part: NvlinkPrepareAndFinalize, buffers: NvlinkBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why: `test_rows_that_are_combined_where_they_lie_race_with_the_next_dispatch`."""
    done, given = prepare(part, rows_of(3)), []
    monkeypatch.setattr(nvlink, "nvlink_combine", lambda _, y, **__: given.append(y))
    part.finalize(done.rows.x, done.ticket, out_TH=torch.empty(3, 16, device=DEVICE))
    (y,) = given
    assert y.data_ptr() != buffers.slots[done.ticket.slot].rows.data_ptr()
    assert torch.equal(y[:3], rows_of(3))


def test_a_lost_rank_is_told_where_no_step_runs_on_the_host(
    part: NvlinkPrepareAndFinalize, buffers: NvlinkBuffers
) -> None:
    part.raise_if_lost()
    buffers.slots[0].host_failure.fill_(2 << 48 | 3 << 32 | 1234)
    with pytest.raises(RankLostError, match="nothing came from rank"):
        part.raise_if_lost()

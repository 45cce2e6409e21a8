"""What `pplx` decides without pplx-kernels: routing in which every slot names an expert of its own."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_modular.errors import MoEModularError, ShapeError, UnsupportedError
from vllm_moe_modular.kernels.quantize_fp8 import rows_in_fp8
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.prepare_finalize.pplx import PplxPrepareAndFinalize, complete_routing, tokens_to_send
from vllm_moe_modular.prepare_finalize.pplx_library import PplxBuffers, PplxShape, fp8_scales, load_pplx, pplx_round

SHAPE = PplxShape(tokens_per_round=4, hidden=16, dtype=torch.bfloat16, experts=8, top_k=2)


@pytest.mark.parametrize(
    ("ids", "weights", "want_ids", "want_weights"),
    [
        pytest.param([3, 1], [0.5, 2.0], [3, 1], [0.5, 2.0], id="nothing to do"),
        pytest.param([-1, 1], [float("nan"), 2.0], [4, 1], [0.0, 2.0], id="a slot without"),
        pytest.param([-1, 4], [1.0, 2.0], [3, 4], [0.0, 2.0], id="a filler that is named already"),
        pytest.param([-1, -1], [1.0, 2.0], [4, 3], [0.0, 0.0], id="no slot has one"),
        pytest.param([1, 1], [0.5, 2.0], [1, 4], [2.5, 0.0], id="an expert named twice"),
        pytest.param([4, 4], [0.5, 2.0], [4, 3], [2.5, 0.0], id="a filler named twice"),
    ],
)
def test_what_becomes_of_a_token(
    ids: list[int], weights: list[float], want_ids: list[int], want_weights: list[float]
) -> None:
    fillers = torch.tensor([4, 3])
    got_ids, got_weights = complete_routing(torch.tensor([ids]), torch.tensor([weights]), fillers)
    assert got_ids.tolist() == [want_ids]
    assert got_weights.tolist() == [want_weights]


@pytest.mark.parametrize("K", [1, 4, 8])
def test_any_routing_keeps_its_sum_and_names_each_expert_once(K: int) -> None:
    g = torch.Generator().manual_seed(K)
    ids = torch.randint(-1, 8, (300, K), generator=g)
    weights = torch.randint(1, 5, (300, K), generator=g).float().masked_fill(ids < 0, float("nan"))
    got_ids, got_weights = complete_routing(ids, weights, torch.randperm(8, generator=g)[:K])
    assert all(len(set(token)) == K and min(token) >= 0 for token in got_ids.tolist())

    def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        known = torch.where(ids >= 0, weights, 0.0)
        return torch.zeros(len(ids), 9).scatter_add_(1, ids.where(ids >= 0, 8), known)[:, :8]

    assert torch.equal(by_expert(got_ids, got_weights), by_expert(ids, weights))


def test_tokens_at_the_end_without_experts_are_not_sent() -> None:
    assert tokens_to_send(torch.tensor([[-1, 2], [-1, -1], [0, 1], [-1, -1]])).tolist() == [3]
    assert tokens_to_send(torch.tensor([[-1, -1]])).tolist() == [0]


@pytest.mark.parametrize(
    ("limit", "capacity", "ranks", "want"),
    [
        pytest.param(256, 8192, 2, 132, id="a token for each program on one host"),
        pytest.param(64, 8192, 2, 64, id="the setting is less"),
        pytest.param(256, 16, 2, 16, id="a step is less"),
        pytest.param(256, 8192, 16, 256, id="several hosts"),
        pytest.param(256, 0, 2, 1, id="nothing"),
    ],
)
def test_tokens_of_a_round(limit: int, capacity: int, ranks: int, want: int) -> None:
    assert pplx_round(limit, capacity, ranks, multiprocessors=132) == want


def test_a_third_call_in_flight_is_refused() -> None:
    buffers = PplxBuffers(SHAPE, [None, None], rank=0)
    assert [buffers.take(), buffers.take()] == [0, 1]
    with pytest.raises(MoEModularError, match="pplx, rank 0: 2 calls are in flight already"):
        buffers.take()
    buffers.give_back(1)
    assert buffers.take() == 1


@pytest.mark.skipif(find_spec("pplx_kernels") is not None, reason="pplx-kernels is installed here")
def test_a_missing_library_is_named_with_what_the_loader_says() -> None:
    with pytest.raises(UnsupportedError, match=r"pplx-kernels that cannot be loaded .*'pplx_kernels'.*doctor"):
        load_pplx()


class Transport:
    """In place of the library's; fails where it is told to."""

    fails = ""
    given: Mapping[str, Any] = MappingProxyType({})

    def dispatch(self, **given: Any) -> None:
        if self.fails == "dispatch":
            raise RuntimeError(self.fails)
        self.given = given
        given["out_expert_num_tokens"].zero_()
        given["out_expert_x"].view(torch.uint8).zero_()

    def combine(self, **_: Any) -> None:
        if self.fails == "combine":
            raise RuntimeError(self.fails)


def part_over(buffers: PplxBuffers) -> PplxPrepareAndFinalize:
    group: Any = SimpleNamespace(rank=0, size=1)
    placement, cpu = ExpertPlacement.linear(8, 1), torch.device("cpu")
    part = PplxPrepareAndFinalize(
        group=group, buffers=buffers, placement=placement, hidden=buffers.shape.hidden, dtype=torch.bfloat16, device=cpu
    )
    part._experts.ids = lambda ids, **_: ids.long()  # type: ignore[method-assign]  # a GPU's kernel
    return part


def prepared(part: PplxPrepareAndFinalize, *, top_k: int = 2) -> Any:
    ids = torch.arange(top_k).expand(3, top_k)
    x = torch.randn(3, part._hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    return part.prepare(x, ids, torch.ones(3, top_k), max_tokens_per_rank=3, router_weight_on_input=False)


def test_a_call_that_fails_gives_its_buffers_back() -> None:
    transport = Transport()
    part = part_over(PplxBuffers(SHAPE, [transport], rank=0))
    out = torch.zeros(3, 16, dtype=torch.bfloat16)
    for _ in range(2):
        transport.fails = "dispatch"
        with pytest.raises(RuntimeError, match="dispatch"):
            prepared(part)
        transport.fails = "combine"
        done = prepared(part)
        with pytest.raises(ShapeError, match="y: expected"):
            part.finalize(done.rows.x[1:], done.ticket, out_TH=out)
        with pytest.raises(RuntimeError, match="combine"):
            part.finalize(done.rows.x, done.ticket, out_TH=out)


def test_a_ticket_is_finalized_once() -> None:
    buffers = PplxBuffers(SHAPE, [Transport(), Transport()], rank=0)
    part, out = part_over(buffers), torch.zeros(3, 16, dtype=torch.bfloat16)
    done = prepared(part)
    part.finalize(done.rows.x, done.ticket, out_TH=out)
    with pytest.raises(MoEModularError, match="pplx, rank 0: buffers 0 are free already"):
        part.finalize(done.rows.x, done.ticket, out_TH=out)
    with pytest.raises(MoEModularError, match="free already"):
        buffers.give_back(1)
    assert [buffers.take(), buffers.take()] == [0, 1]


def test_another_top_k_than_that_of_the_buffers_is_refused() -> None:
    buffers = PplxBuffers(SHAPE, [Transport()], rank=0)
    with pytest.raises(ShapeError, match=r"topk_ids_TK: expected shape \[T=3, K=2\], got \[3, 3\]"):
        prepared(part_over(buffers), top_k=3)
    assert buffers.take() == 0


@pytest.mark.parametrize(("hidden", "scales"), [(512, 4), (7168, 56), (2880, 0), (256, 0), (640, 0)])
def test_rows_in_fp8_have_scales_by_16_bytes(hidden: int, scales: int) -> None:
    assert fp8_scales(hidden) == scales
    assert replace(SHAPE, hidden=hidden).scales == 0, "rows as they are have none"


def test_rows_go_out_in_fp8_and_come_home_as_the_layer_has_them() -> None:
    transport = Transport()
    part = part_over(PplxBuffers(replace(SHAPE, hidden=512, dtype=torch.float8_e4m3fn), [transport], rank=0))
    done = prepared(part)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = rows_in_fp8(x)  # right or not is tested where it is
    assert torch.equal(transport.given["dp_x"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(transport.given["dp_x_scale"], scales)
    assert done.rows.x.dtype == torch.float8_e4m3fn
    assert done.rows.x.shape == (8, 4, 512)
    assert (done.rows.x_scale.shape, done.rows.x_scale.dtype) == ((8, 4, 4), torch.float32)
    y = torch.zeros(8, 4, 512, dtype=torch.bfloat16)
    part.finalize(y, done.ticket, out_TH=torch.zeros(3, 512, dtype=torch.bfloat16))
    again = prepared(part)
    with pytest.raises(UnsupportedError, match=r"y in torch\.float8_e4m3fn in pplx"):
        part.finalize(again.rows.x, again.ticket, out_TH=torch.zeros(3, 512, dtype=torch.bfloat16))


def test_a_token_without_experts_comes_home_as_0_whatever_it_holds() -> None:
    """The library sends it to an expert with a weight of 0, and 0 times NaN is NaN."""
    transport = Transport()
    part = part_over(PplxBuffers(SHAPE, [transport], rank=0))
    transport.combine = lambda out_tokens, **_: out_tokens.fill_(float("nan"))  # type: ignore[method-assign]
    ids = torch.tensor([[1, 2], [-1, -1], [3, 4]])
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    done = part.prepare(x, ids, torch.ones(3, 2), max_tokens_per_rank=3, router_weight_on_input=False)
    out = torch.ones(3, 16, dtype=torch.bfloat16)
    part.finalize(done.rows.x, done.ticket, out_TH=out)
    assert out.isnan().all(1).tolist() == [True, False, True]
    assert not out[1].any()

"""What the DeepEP all-to-alls decide without DeepEP: sizes, limits, variables, the order of sending and receiving."""

from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_modular.errors import RankLostError, UnsupportedError
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.prepare_finalize import deepep_library as library
from vllm_moe_modular.prepare_finalize.deepep_library import LowLatencyBuffer, LowLatencyShape
from vllm_moe_modular.prepare_finalize.uniform_experts import (
    UniformExperts,
    padded_blocks,
    padded_rows,
    uniform_numbers,
)

SHAPE = LowLatencyShape(tokens_per_round=8, hidden=2048, experts=4)


@pytest.mark.parametrize(
    ("hidden", "sent"), [(64, 2048), (2048, 2048), (2880, 3072), (4097, 5120), (7168, 7168), (8192, 8192)]
)
def test_low_latency_sends_the_next_size_that_it_was_compiled_for(hidden: int, sent: int) -> None:
    assert library.low_latency_hidden(hidden) == sent


def test_more_columns_than_the_largest_size_are_refused_with_the_limit() -> None:
    with pytest.raises(UnsupportedError, match=r"hidden size 8193 in deepep_low_latency .*at most 8192"):
        library.low_latency_hidden(8193)
    with pytest.raises(UnsupportedError, match=r"hidden size 8192 in deepep_high_throughput .*at most 7936"):
        library.high_throughput_hidden(8192)


@pytest.mark.parametrize(("hidden", "sent"), [(64, 256), (2048, 2048), (2880, 3072), (7168, 7168), (7936, 7936)])
def test_high_throughput_sends_whole_copies_of_a_warp(hidden: int, sent: int) -> None:
    assert library.high_throughput_hidden(hidden) == sent


@pytest.mark.parametrize(
    ("hidden", "low_latency", "high_throughput"),
    [(256, False, False), (2048, True, True), (2304, False, False), (3584, False, True), (7168, True, True)],
)
def test_rows_go_out_in_fp8_only_at_their_own_width(hidden: int, low_latency: bool, high_throughput: bool) -> None:
    widths = library.low_latency_hidden(hidden), library.high_throughput_hidden(hidden, fp8=True)
    told = tuple(library.sends_fp8(hidden, wire_hidden=width, fp8_rows=True) for width in widths)
    assert told == (low_latency, high_throughput)
    assert not any(library.sends_fp8(hidden, wire_hidden=width, fp8_rows=False) for width in widths)


@pytest.mark.parametrize(
    ("limit", "capacity", "ranks", "tokens"),
    [
        pytest.param(256, 8192, 2, 256, id="the limit"),
        pytest.param(256, 100, 2, 100, id="no more than a step brings"),
        pytest.param(256, 7, 2, 64, id="small steps of all kinds alike"),
        pytest.param(256, 101, 2, 102, id="a multiple of 4 over two ranks"),
        pytest.param(5, 100, 1, 8, id="a multiple of 4 over one rank"),
        pytest.param(5, 100, 8, 5, id="eight ranks are one already"),
        pytest.param(1024, 8192, 3, 1024, id="never above the hard limit"),
        pytest.param(8, 0, 2, 8, id="no capacity"),
    ],
)
def test_tokens_of_a_round(limit: int, capacity: int, ranks: int, tokens: int) -> None:
    assert library.low_latency_round(limit, capacity, ranks) == tokens
    assert tokens * ranks % 4 == 0


@pytest.mark.parametrize(
    ("tokens", "depth"), [(8, 1024), (256, 1024), (511, 1024), (512, 2048), (1024, 4096)], ids=lambda v: str(v)
)
def test_queues_are_made_deep_enough_where_the_user_says_nothing(tokens: int, depth: int) -> None:
    environ: dict[str, str] = {}
    library.require_qp_depth(environ, tokens)
    assert environ == {"NVSHMEM_QP_DEPTH": str(depth)}
    library.require_qp_depth(environ, tokens)
    assert depth >= 2 * (tokens + 1)


@pytest.mark.parametrize("given", ["1024", "2049", "deep", ""])
def test_a_depth_of_the_user_that_is_too_small_is_named_with_the_one_that_does(given: str) -> None:
    with pytest.raises(UnsupportedError, match=f"NVSHMEM_QP_DEPTH={given} with rounds of 1024 .*at least 2050"):
        library.require_qp_depth({"NVSHMEM_QP_DEPTH": given}, 1024)


def test_what_the_library_would_stop_at_is_refused_with_the_limit() -> None:
    library.require_high_throughput(ranks=8, local_experts=128, top_k=32)
    library.require_high_throughput(ranks=16, local_experts=200, top_k=8)
    with pytest.raises(UnsupportedError, match=r"3 ranks in deepep_high_throughput .*2, 4, 8, 16"):
        library.require_high_throughput(ranks=3, local_experts=4, top_k=2)
    with pytest.raises(UnsupportedError, match=r"129 experts on a rank .*at most 128"):
        library.require_high_throughput(ranks=2, local_experts=129, top_k=2)
    with pytest.raises(UnsupportedError, match=r"top 33 in deepep_high_throughput .*at most top 32"):
        library.require_high_throughput(ranks=2, local_experts=4, top_k=33)
    library.require_low_latency(ranks=3, top_k=11)
    with pytest.raises(UnsupportedError, match="12 ranks in deepep_low_latency"):
        library.require_low_latency(ranks=12, top_k=8)
    with pytest.raises(UnsupportedError, match=r"top 12 in deepep_low_latency .*at most top 11"):
        library.require_low_latency(ranks=2, top_k=12)


@dataclass
class Hints:
    """Of one kernel's configuration."""

    nvlink: int
    rdma: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvlink * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks > 8, "a build without NVSHMEM stops when it is asked for one host"
        return self.rdma * hidden_bytes


def test_buffers_are_as_large_as_either_kernel_wants() -> None:
    hints = [Hints(nvlink=3, rdma=5), Hints(nvlink=2, rdma=7)]
    assert library.high_throughput_bytes(hints, hidden_bytes=10, ranks=2) == (60, 0)
    assert library.high_throughput_bytes(hints, hidden_bytes=10, ranks=16) == (480, 70)


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed here")
def test_a_missing_library_is_named_with_what_the_loader_says() -> None:
    with pytest.raises(UnsupportedError, match=r"DeepEP that cannot be loaded .*No module named 'deep_ep'.*doctor"):
        library.load_deepep()


def test_what_was_sent_off_is_received_before_the_next_kernel_and_once() -> None:
    buffer, order = LowLatencyBuffer(None, SHAPE), []
    first = buffer.sent_off(lambda: order.append("first"))
    buffer.settle()
    second = buffer.sent_off(lambda: order.append("second"))
    first()
    assert order == ["first"]
    second()
    second()
    buffer.settle()
    assert order == ["first", "second"]


def test_only_a_wait_that_ended_is_a_lost_rank() -> None:
    group: Any = SimpleNamespace(rank=0, size=2)
    said = r"rank 0 of 2: some rank did not take part in the dispatch .*100 s"
    with pytest.raises(RankLostError, match=said), library.losses(group, "part", "dispatch"):
        raise RuntimeError("DeepEP error: CPU recv timeout")
    with pytest.raises(RuntimeError, match="out of memory"), library.losses(group, "part", "dispatch"):
        raise RuntimeError("out of memory")


def test_a_set_up_that_fails_says_so_even_where_the_library_does_not() -> None:
    said = r"part here, whose set-up failed \(a bare AssertionError\)"
    with pytest.raises(UnsupportedError, match=said), library.set_up_failures("part"):
        raise AssertionError


@pytest.mark.parametrize(
    ("held", "numbers"),
    [
        pytest.param([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 4, 5], id="blocks of one size"),
        pytest.param([[0, 1, 2], [3, 4]], [0, 1, 2, 3, 4], id="a smaller last block"),
        pytest.param([[4, 2, 0], [3, 1]], [2, 4, 1, 3, 0], id="scattered"),
        pytest.param([[], [0, 1]], [2, 3], id="a rank without experts"),
    ],
)
def test_experts_are_numbered_as_if_every_rank_had_as_many(held: list[list[int]], numbers: list[int]) -> None:
    G = sum(map(len, held))
    maps = [[of.index(g) if g in of else -1 for g in range(G)] for of in held]
    placement = ExpertPlacement.from_expert_maps(maps)
    assert uniform_numbers(placement) == numbers
    experts = UniformExperts(placement, dtype=torch.int64, device=torch.device("cpu"))
    ids = torch.tensor([[*range(G), -1, G, G + 7]], dtype=torch.int32)
    assert experts.ids(ids).tolist() == [[*numbers, -1, -1, -1]]
    assert experts.ids(ids).dtype == torch.int64
    assert experts.total == len(held) * experts.per_rank


def test_ids_that_need_no_change_are_passed_on() -> None:
    experts = UniformExperts(ExpertPlacement.linear(6, 2), dtype=torch.int64, device=torch.device("cpu"))
    ids = torch.tensor([[5, -1], [0, 9]])
    assert experts.ids(ids, past_the_end_is_none=True) is ids
    assert experts.ids(ids).tolist() == [[5, -1], [0, -1]]


def test_rows_and_blocks_are_padded_only_where_they_must_be() -> None:
    x = torch.randn(3, 5)
    assert padded_rows(x, 5, least_rows=1) is x
    wide = padded_rows(x, 8)
    assert torch.equal(wide[:, :5], x)
    assert not wide[:, 5:].any()
    assert padded_rows(x[:0], 5, least_rows=1).shape == (1, 5)
    y = torch.randn(2, 3, 5)
    assert padded_blocks(y, 2, 5) is y
    assert torch.equal(padded_blocks(y, 4, 8)[:2, :, :5], y)

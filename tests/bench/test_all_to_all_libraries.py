"""bench.all_to_all_libraries: how the libraries are called, on stand-ins for them that serve one rank.

The stand-ins take no keyword that the libraries do not take, and what they do with the rows is what the libraries do.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_modular.bench import all_to_all_libraries as libraries
from vllm_moe_modular.bench.all_to_all_cases import BFLOAT16, FP8, Case
from vllm_moe_modular.bench.all_to_all_peers import Transfer, answer, draw, in_rounds, right_answer, round_trip
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.reference.quantize_fp8 import quantize_fp8
from vllm_moe_modular.testing.ranks import Here

HERE: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), group=None)


def case_of(rows: str = BFLOAT16, **other: int) -> Case:
    return Case(
        **{"T": 5, "H": 2048, "G": 4, "K": 2, "capacity_tokens": 8, "low_latency_tokens": 4, **other}, rows=rows
    )


def into_blocks(x: torch.Tensor, ids: torch.Tensor, out_ELH: torch.Tensor) -> torch.Tensor:
    """Writes each token's row into the block of each of its experts; how many are in each, int32."""
    counts = [0] * len(out_ELH)
    for row, experts in zip(x, ids.tolist(), strict=True):
        for e in experts:
            out_ELH[e, counts[e]] = row
            counts[e] += 1
    return torch.tensor(counts, dtype=torch.int32)


def out_of_blocks(y_ELH: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, H], the weighted sums of the rows that `into_blocks` wrote."""
    counts, out = [0] * len(y_ELH), []
    for experts, of_token in zip(ids.tolist(), weights.tolist(), strict=True):
        rows = []
        for e, weight in zip(experts, of_token, strict=True):
            rows.append(y_ELH[e, counts[e]].float() * weight)
            counts[e] += 1
        out.append(torch.stack(rows).sum(0))
    return torch.stack(out).to(y_ELH.dtype)


class DeepEP:
    """In place of `deep_ep.Buffer`."""

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert num_experts == 4
        return "per rank", None, "per expert", "is in rank", None

    def dispatch(
        self, x: Any, *, num_tokens_per_rank: Any, num_tokens_per_rdma_rank: Any, is_token_in_rank: Any,
        num_tokens_per_expert: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, config: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank)
        assert layout == ("per rank", None, "per expert", "is in rank")
        assert config == "dispatch config"
        return x, topk_idx, topk_weights, [], "handle", None

    def combine(self, x: torch.Tensor, handle: Any, *, config: Any) -> tuple[Any, ...]:
        assert (handle, config, x.dtype) == ("handle", "combine config", torch.bfloat16)
        return x.clone(), None, None

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max: int, num_experts: int, *, use_fp8: bool
    ) -> tuple[Any, ...]:
        assert len(x) <= num_max
        blocks = x.new_zeros(num_experts, num_max, x.shape[1])
        counts = into_blocks(x, topk_idx, blocks)
        if not use_fp8:
            return blocks, counts, "handle", None, None
        values, scales = quantize_fp8(blocks.flatten(0, 1))
        return (values.view(blocks.shape), scales.view(num_experts, num_max, -1)), counts, "handle", None, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> tuple[Any, ...]:
        assert (handle, x.dtype) == ("handle", torch.bfloat16)
        return out_of_blocks(x, topk_idx, topk_weights), None, None


class AllToAll:
    """In place of `pplx_kernels.AllToAll`."""

    def dispatch(
        self, *, out_expert_num_tokens: torch.Tensor, out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None, dp_x: torch.Tensor, dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor, bound_m: torch.Tensor,
    ) -> None:  # fmt: skip
        assert (indices.dtype, bound_m.dtype, bound_m.tolist()) == (torch.uint32, torch.uint32, [len(dp_x)])
        is_fp8 = dp_x.dtype == torch.float8_e4m3fn
        assert [out_expert_x_scale is not None, dp_x_scale is not None] == [is_fp8, is_fp8]
        if out_expert_x_scale is not None and dp_x_scale is not None:
            into_blocks(dp_x_scale, indices, out_expert_x_scale)
        out_expert_num_tokens.copy_(into_blocks(dp_x, indices, out_expert_x))

    def combine(
        self, *, out_tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, expert_y: torch.Tensor,
        bound_m: torch.Tensor,
    ) -> None:  # fmt: skip
        assert bound_m.tolist() == [len(out_tokens)]
        out_tokens.copy_(out_of_blocks(expert_y, indices, weights))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    high = SimpleNamespace(buffer=DeepEP(), dispatch_config="dispatch config", combine_config="combine config")
    for name, value in {
        "group_of": lambda _: None,
        "load_deepep": lambda: SimpleNamespace(topk_idx_t=torch.int64),
        "require_high_throughput": lambda **_: None,
        "high_throughput_buffer": lambda *_: high,
        "low_latency_buffer": lambda *_, **__: high,
        "pplx_buffers": lambda *_: SimpleNamespace(transports=[AllToAll()]),
        "multiprocessors": lambda _: 132,
    }.items():
        monkeypatch.setattr(libraries, name, value)


@pytest.mark.parametrize(
    ("make", "rows", "combine_takes", "rounds"),
    [
        pytest.param(libraries.DeepEPHighThroughput, BFLOAT16, "reduced rows", 1, id="deep_ep.high_throughput"),
        pytest.param(libraries.DeepEPHighThroughput, FP8, "reduced rows", 1, id="deep_ep.high_throughput, fp8"),
        pytest.param(libraries.DeepEPLowLatency, BFLOAT16, "expert rows", 2, id="deep_ep.low_latency"),
        pytest.param(libraries.DeepEPLowLatency, FP8, "expert rows", 2, id="deep_ep.low_latency, fp8"),
        pytest.param(libraries.Pplx, BFLOAT16, "expert rows", 2, id="pplx_kernels"),
        pytest.param(libraries.Pplx, FP8, "expert rows", 2, id="pplx_kernels, fp8"),
    ],
)
def test_tokens_come_home_through_experts_that_return_them(
    make: Callable[[Here, Case], Transfer], rows: str, combine_takes: str, rounds: int
) -> None:
    case = case_of(rows)
    tokens, transfer = draw(case, HERE, 0), make(HERE, case)
    cut = in_rounds(transfer, tokens)
    assert len(cut) == rounds, "4 tokens in one of low latency"
    assert torch.equal(answer(transfer, cut), right_answer(tokens))
    assert transfer.combine_takes == combine_takes
    assert transfer.sends_fp8 == (rows == FP8)
    assert transfer.ran.startswith(__name__)
    for given in cut:
        sent = transfer.dispatch(given)
        timed, meant = transfer.unchanged(sent), transfer.experts(sent)
        assert (timed.shape, timed.dtype) == (meant.shape, meant.dtype), "what is timed moves as much as what is meant"
    round_trip(transfer, cut)


@pytest.mark.parametrize(
    ("make", "case", "says"),
    [
        (libraries.DeepEPHighThroughput, case_of(H=100), "hidden size 100 in deep_ep.Buffer .* it sends 256 columns"),
        (libraries.DeepEPHighThroughput, case_of(FP8, H=2304), "it sends 2560 columns"),
        (libraries.DeepEPLowLatency, case_of(H=2176), "it sends 2560 columns"),
        (libraries.DeepEPLowLatency, case_of(K=12, G=16), "top 12 in deepep_low_latency"),
        (libraries.Pplx, case_of(FP8, H=640), "pplx_kernels with rows of 640 columns in fp8"),
        (libraries.Pplx, case_of(H=2044), "it sends 2048 columns"),
        (libraries.Nccl, case_of(FP8), "NCCL by hand with rows in fp8"),
    ],
)
def test_a_case_that_a_direct_call_does_not_take_is_refused(
    make: Callable[[Here, Case], Transfer], case: Case, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        make(HERE, case)

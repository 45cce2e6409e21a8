"""The triton experts with a tuned table: they run what it says and give the same result."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.experts.test_triton_experts import SILU, Case, reference, run
from tests.kernels.interpreter import rounds_to_nearest  # noqa: F401
from vllm_moe_modular.experts import triton_experts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.experts.triton_or_deep_gemm_experts import prefers_deep_gemm
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.kernels.tuned_tables import TunedCell, TunedTable, tuned_shape
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

TILES = GemmTiles(32, gated=GemmTile(16, 16, 1, 4, 2), down=GemmTile(32, 16, 1, 4, 2), gather_first=True)
CELL = TunedCell(rows=16, tiles=TILES, grouped_gemm_us=10.0)


def tuned(weights, cell: TunedCell = CELL) -> TritonExperts:  # type: ignore[no-untyped-def]
    return TritonExperts(SILU, tuned=TunedTable("", {tuned_shape(weights, 2): (cell,)}))


def test_a_table_is_honoured_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def gated(*args: Any, **named: Any) -> None:
        ran.append((named["block_rows"], named["tile"], named["gathered"]))
        grouped_gemm_gated(*args, **named)

    monkeypatch.setattr(triton_experts, "grouped_gemm_gated", gated)
    case = Case("", R=13)
    rows, weights = case.problem(torch.float16)
    experts = tuned(weights)
    got = run(rows, weights, experts)
    assert torch.equal(got, run(rows, weights, TritonExperts(SILU, tiles=TILES)))
    naive, truth = (reference(rows, weights, case, dtype) for dtype in (torch.float16, torch.float64))
    assert_as_accurate_as(got, naive, truth)
    assert ran == [(TILES.block_rows, TILES.gated, TILES.gather_first)] * 2


@pytest.mark.parametrize(("small_us", "buffers"), [(9.0, 2), (11.0, 3)], ids=["slot by slot", "in blocks"])
def test_the_table_says_when_to_go_slot_by_slot(small_us: float, buffers: int) -> None:
    case = Case("", R=4)
    rows, weights = case.problem(torch.float16)
    experts = tuned(weights, replace(CELL, rows=4, small_batch_us=small_us))
    assert len(experts.workspace(rows, weights)) == buffers
    naive, truth = (reference(rows, weights, case, dtype) for dtype in (torch.float16, torch.float64))
    assert_as_accurate_as(run(rows, weights, experts), naive, truth)


def test_rows_that_no_cell_is_near_to_run_as_without_a_table() -> None:
    rows, weights = Case("", R=40).problem(torch.float16)
    assert torch.equal(run(rows, weights, tuned(weights)), run(rows, weights, TritonExperts(SILU)))


def test_the_table_chooses_between_triton_and_deep_gemm_in_fp8() -> None:
    slots, E = 4096 * 8, 128
    assert prefers_deep_gemm(slots=slots, num_experts=E, fp8=True)
    assert prefers_deep_gemm(slots=slots, num_experts=E, fp8=True, tuned=CELL), "it does not say"
    assert not prefers_deep_gemm(slots=slots, num_experts=E, fp8=True, tuned=replace(CELL, deep_gemm_us=10.5))
    faster = replace(CELL, deep_gemm_us=9.5)
    assert prefers_deep_gemm(slots=8, num_experts=E, fp8=True, tuned=faster)
    assert not prefers_deep_gemm(slots=slots, num_experts=E, fp8=False, tuned=faster), "it takes more scratch memory"

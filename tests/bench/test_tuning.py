"""bench.tuning: the search, with times that are made up. Needs no GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import pytest

from vllm_moe_modular.bench import tile_candidates
from vllm_moe_modular.bench.shapes import FP8, SHAPES, Shape
from vllm_moe_modular.bench.tuning import (
    DEEP_GEMM,
    SMALL_BATCH,
    TuningError,
    Way,
    key_of,
    missing_cells,
    tune_cell,
)
from vllm_moe_modular.kernels.gemm_tiles import HOPPER_SHARED_MEMORY_BYTES, GemmTiles, may_fit
from vllm_moe_modular.kernels.tuned_tables import NO_TABLE, TunedCell

ROOM = HOPPER_SHARED_MEMORY_BYTES
QWEN = SHAPES["qwen3-30b-a3b"]


class Chip:
    """A `Measure` that warms up: every call of it is slower than the one before, for all ways alike."""

    def __init__(self, us: Mapping[Way, float], otherwise: float = 100.0) -> None:
        self.us, self.otherwise, self.asked = us, otherwise, list[list[Way]]()

    def __call__(self, ways: Sequence[Way]) -> dict[Way, float]:
        self.asked.append(list(ways))
        us = {way: self.us.get(way, self.otherwise) for way in ways}
        return {way: t * (1 + 0.1 * len(self.asked)) for way, t in us.items() if t > 0}


def untuned(shape: Shape, rows: int) -> Way:
    return Way(tile_candidates.untuned(shape, rows))


def tuned(shape: Shape, rows: int, chip: Chip, *, deep_gemm: bool = False) -> TunedCell:
    return tune_cell(shape, rows, chip, deep_gemm=deep_gemm, gpu=tile_candidates.HOPPER)


def test_the_fastest_of_both_gemms_is_found() -> None:
    first = tile_candidates.first_round(QWEN, 512)
    gated = next(t for t in first if t.block_rows == 32 and t.gated != first[0].gated)
    both = tile_candidates.second_round(QWEN, [gated])[-2]
    chip = Chip({Way(gated): 90.0, Way(both): 80.0})
    cell = tuned(QWEN, 512, chip)
    assert cell.tiles == both
    assert cell.rows == 512
    assert cell.grouped_gemm_us / (cell.untuned_us or 0) == pytest.approx(0.8), "of the same turn"


def test_the_untuned_tiles_run_in_every_round() -> None:
    chip = Chip({})
    tuned(QWEN, 512, chip)
    assert len(chip.asked) == 3
    for ways in chip.asked:
        assert untuned(QWEN, 512) in ways
        assert len(set(ways)) == len(ways)


def test_noise_does_not_replace_the_untuned_tiles() -> None:
    other = tile_candidates.first_round(QWEN, 512)[1]
    assert tuned(QWEN, 512, Chip({Way(other): 99.5})).tiles == untuned(QWEN, 512).tiles


def test_what_fails_or_is_wrong_is_left_out() -> None:
    ways = [Way(tiles) for tiles in tile_candidates.first_round(QWEN, 512)[1:]]
    assert tuned(QWEN, 512, Chip(dict.fromkeys(ways, -1.0))).tiles == untuned(QWEN, 512).tiles
    with pytest.raises(TuningError, match="qwen3-30b-a3b, 512 rows: the untuned tiles"):
        tuned(QWEN, 512, Chip({untuned(QWEN, 512): -1.0}))


def test_heights_that_are_far_from_the_best_are_given_up() -> None:
    slow = {Way(t): 200.0 for t in tile_candidates.first_round(QWEN, 512) if t.block_rows == 32}
    assert slow
    chip = Chip(slow)
    tuned(QWEN, 512, chip)
    assert all(way.tiles is None or way.tiles.block_rows != 32 for ways in chip.asked[1:] for way in ways)


@pytest.mark.parametrize(
    ("rows", "deep_gemm", "others"),
    [
        (1, True, {SMALL_BATCH}), (4, True, {SMALL_BATCH}), (8, True, set()), (512, False, set()),
        (512, True, {DEEP_GEMM}),
    ],
)  # fmt: skip
def test_the_other_kernels_run_where_they_may_win(rows: int, deep_gemm: bool, others: set[Way]) -> None:
    chip = Chip({SMALL_BATCH: 50.0, DEEP_GEMM: 60.0})
    cell = tuned(QWEN, rows, chip, deep_gemm=deep_gemm)
    assert {way for ways in chip.asked for way in ways if way.tiles is None} == others
    assert (cell.small_batch_us is not None) == (SMALL_BATCH in others)
    assert cell.prefers_deep_gemm(False) == (DEEP_GEMM in others)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 64, 512, 2048, 16384])
@pytest.mark.parametrize("shape", [*SHAPES.values(), replace(QWEN, weights=FP8)], ids=str)
def test_candidates_fit_are_few_and_begin_with_the_untuned(shape: Shape, rows: int) -> None:
    first = tile_candidates.first_round(shape, rows)
    assert first[0] == tile_candidates.untuned(shape, rows)
    assert len(first) <= 24
    second = tile_candidates.second_round(shape, first[1:3])
    of_fp8 = {"block_depth": 128, "block_columns": 128}
    for tiles in (*first, *second):
        for tile, outputs in ((tiles.gated, 2), (tiles.down, 1)):
            assert may_fit(
                tile, block_rows=tiles.block_rows, columns_per_output=outputs, itemsize=1 if shape.fp8 else 2,
                shared_memory_bytes=ROOM,
            )  # fmt: skip
        if shape.fp8:
            assert asdict(tiles.gated) | of_fp8 == asdict(tiles.gated)


def test_a_smaller_gpu_gets_candidates_too() -> None:
    ada = tile_candidates.Gpu(99 * 1024, can_specialize=False)
    for rows in (8, 64, 512, 8192):
        assert len(tile_candidates.first_round(QWEN, rows, ada)) > 1


@pytest.mark.parametrize("shape", [QWEN, replace(QWEN, weights=FP8)], ids=["bf16", "fp8"])
def test_everything_that_is_tried_was_compiled_ahead(shape: Shape) -> None:
    """A kernel is known by the height, its own tile and, of the first GEMM, whether the rows were gathered."""

    def kernels(tried: Sequence[GemmTiles]) -> set[object]:
        return {(t.block_rows, t.gated, t.gather_first) for t in tried} | {(t.block_rows, t.down) for t in tried}

    for rows in (1, 8, 64, 512, 8192):
        first = tile_candidates.first_round(shape, rows)
        tried = [*first, *tile_candidates.second_round(shape, [t for t in first[1:] if not t.gather_first])]
        compiled = kernels(tile_candidates.to_compile(shape, [rows]))
        assert kernels(tried) <= compiled, kernels(tried) - compiled


def test_cells_that_a_table_has_are_not_tuned_again() -> None:
    cell = TunedCell(rows=8, tiles=tile_candidates.untuned(QWEN, 8), grouped_gemm_us=1.0)
    table = NO_TABLE.with_cell(key_of(QWEN), cell)
    mixtral = SHAPES["mixtral-8x7b"]
    assert missing_cells([(QWEN, [1, 8, 8, 32]), (mixtral, [8])], table) == [(QWEN, [1, 32]), (mixtral, [8])]
    assert missing_cells([(QWEN, [8])], table) == []

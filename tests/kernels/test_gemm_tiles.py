"""kernels.gemm_tiles: what a tile has to satisfy on any device, checked without one."""

import pytest

from vllm_moe_modular.kernels.gemm_tiles import HOPPER_SHARED_MEMORY_BYTES, GemmTiles, choose_tiles

SHAPES = [(128, 8, 2048, 768), (8, 2, 4096, 14336), (12, 3, 40, 24), (1, 1, 16, 16)]


@pytest.mark.parametrize("kib", [99, 163, 227], ids=["Ada", "Ampere", "Hopper"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 4096, 100_000])
@pytest.mark.parametrize(("E", "K", "H", "F"), SHAPES)
def test_tiles_fit(rows: int, E: int, K: int, H: int, F: int, itemsize: int, kib: int) -> None:
    tiles = choose_tiles(
        slots=rows * K, num_experts=E, hidden=H, intermediate=F, itemsize=itemsize, shared_memory_bytes=kib * 1024
    )
    for tile, columns in ((tiles.gated, 2 * tiles.gated.block_columns), (tiles.down, tiles.down.block_columns)):
        for size in (tiles.block_rows, columns, tile.block_depth):
            assert size.bit_count() == 1
            assert size >= 16
        stage_bytes = (tiles.block_rows + columns) * tile.block_depth * itemsize
        assert stage_bytes * tile.num_stages < kib * 1024


def test_hopper_gets_the_tiles_that_were_measured() -> None:
    tiles = choose_tiles(slots=65536, num_experts=128, hidden=2048, intermediate=768, itemsize=2)
    assert (tiles.gated.block_columns, tiles.gated.num_stages) == (128, 4)
    assert (tiles.down.block_columns, tiles.down.num_stages) == (256, 4)
    assert HOPPER_SHARED_MEMORY_BYTES == 232_448


QWEN = {"num_experts": 128, "hidden": 2048, "intermediate": 768}
MIXTRAL = {"num_experts": 8, "hidden": 4096, "intermediate": 14336}


@pytest.mark.parametrize(
    ("mean", "shape", "itemsize", "block_rows", "gated", "down"),
    [
        pytest.param(16, QWEN, 1, 32, False, False, id="fp8, weights are streamed"),
        pytest.param(32, QWEN, 1, 64, True, False, id="fp8, the first alone"),
        pytest.param(128, QWEN, 1, 128, True, True, id="fp8, both"),
        pytest.param(128, QWEN, 2, 128, False, False, id="16 bits, first and last step weigh more than they save"),
        pytest.param(512, QWEN, 2, 128, True, True, id="16 bits, both"),
        pytest.param(128, MIXTRAL, 2, 192, True, True, id="16 bits, one block where half of the experts had two"),
        pytest.param(512, MIXTRAL, 2, 128, False, False, id="16 bits, long sums"),
        pytest.param(512, QWEN, 4, 32, False, False, id="32 bits never"),
    ],
)
def test_where_gemms_are_specialized(
    mean: int, shape: dict[str, int], itemsize: int, block_rows: int, gated: bool, down: bool
) -> None:
    problem = {**shape, "slots": mean * shape["num_experts"], "itemsize": itemsize}
    tiles = choose_tiles(**problem, specialize=True)
    assert (tiles.block_rows, tiles.gated.specialized, tiles.down.specialized) == (block_rows, gated, down)
    assert not choose_tiles(**problem).specialized, "on a device that cannot"
    for tile, columns in ((tiles.gated, 128), (tiles.down, 256)):
        if tile.specialized:
            assert (tile.block_columns, tile.block_depth * itemsize, tile.programs_per_sm) == (columns, 128, 1)
            stage = (tiles.block_rows + 256) * 128
            assert stage * tile.num_stages + 64 * 128 * 2 < HOPPER_SHARED_MEMORY_BYTES, "stages and what is stored"


def test_a_table_for_specialized_gemms_is_left_where_there_are_none() -> None:
    problem = {**QWEN, "slots": 65536, "itemsize": 2}
    tuned: GemmTiles = choose_tiles(**problem, specialize=True)
    assert choose_tiles(**problem, specialize=True, tuned=tuned) == tuned
    assert choose_tiles(**problem, tuned=tuned) == choose_tiles(**problem)

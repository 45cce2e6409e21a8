"""kernels.gemm_tiles: what a tile has to satisfy on any device, checked without one."""

import pytest

from vllm_moe_modular.kernels.gemm_tiles import HOPPER_SHARED_MEMORY_BYTES, choose_tiles

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

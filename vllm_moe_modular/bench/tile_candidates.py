"""Which tiles are worth a try for a shape and a number of rows. Pure.

Letters: R rows, E experts, K top-k, H hidden, F expert intermediate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from vllm_moe_modular.bench.shapes import Shape
from vllm_moe_modular.kernels.gemm_tiles import HOPPER_SHARED_MEMORY_BYTES, GemmTile, GemmTiles, choose_tiles, may_fit

_Pair = tuple[list[GemmTile], list[GemmTile]]


@dataclass(frozen=True)
class Gpu:
    """What it allows.

    Attributes:
        shared_memory_bytes: of a program.
        can_specialize: the GEMMs of the shape, see `launch.can_specialize`.
    """

    shared_memory_bytes: int
    can_specialize: bool

    def has(self, tile: GemmTile) -> bool:
        """Whether it runs such tiles at all."""
        return self.can_specialize or not tile.specialized


HOPPER = Gpu(HOPPER_SHARED_MEMORY_BYTES, can_specialize=True)


def _tile(columns: int, depth: int, warps: int, stages: int, per_sm: int = 0, group_rows: int = 1) -> GemmTile:
    return GemmTile(columns, depth, group_rows, warps, stages, per_sm)


def _specialized(columns: int, depth: int, stages: int = 4, group_rows: int = 8) -> GemmTile:
    return GemmTile(columns, depth, group_rows, 4, stages, programs_per_sm=1, specialized=True)


_TILES: dict[int, _Pair] = {
    16: (
        [_tile(32, 256, 4, 3), _tile(32, 128, 4, 4), _tile(64, 128, 4, 3), _tile(64, 128, 4, 4), _tile(32, 256, 4, 2)],
        [_tile(64, 256, 4, 5), _tile(64, 128, 4, 4), _tile(128, 128, 4, 3), _tile(32, 256, 4, 4), _tile(64, 256, 4, 3)],
    ),
    32: (
        [_tile(64, 128, 4, 3), _tile(32, 256, 4, 3), _tile(64, 64, 4, 4), _tile(128, 64, 4, 3), _tile(64, 128, 8, 3)],
        [_tile(128, 128, 4, 3), _tile(64, 256, 4, 3), _tile(128, 64, 4, 4), _tile(64, 128, 4, 4), _tile(256, 64, 8, 3)],
    ),
    64: (
        [
            _tile(64, 128, 8, 4, 1), _tile(64, 64, 4, 3), _tile(128, 64, 8, 4, 1), _tile(128, 64, 8, 4, 1, 8),
            _tile(128, 64, 4, 5, 1, 8), _tile(64, 128, 4, 2, 2),
        ],
        [
            _tile(128, 128, 4, 4, 1), _tile(128, 64, 4, 4), _tile(128, 128, 8, 4), _tile(256, 64, 8, 4, 1),
            _tile(256, 64, 4, 5, 1, 8), _tile(128, 64, 4, 5, 1),
        ],
    ),
    128: (
        [
            _specialized(128, 64), _tile(128, 64, 8, 4, 1, 8), _tile(128, 64, 8, 4, 1, 1), _tile(128, 64, 8, 4, 1, 16),
            _tile(128, 64, 8, 3, 1, 8), _tile(128, 64, 8, 4, 0, 8), _tile(64, 64, 4, 3, 2, 8),
        ],
        [
            _specialized(256, 64), _tile(256, 64, 8, 4, 1, 8), _tile(128, 64, 8, 6, 1, 8), _tile(256, 64, 8, 4, 1, 1),
            _tile(128, 64, 8, 5, 1, 1), _tile(256, 64, 8, 4, 1, 16), _tile(128, 64, 4, 3, 2, 8),
        ],
    ),
    192: (
        [_specialized(128, 64, stages=3, group_rows=1), _specialized(128, 64, stages=3)],
        [_specialized(256, 64, stages=3, group_rows=1), _specialized(256, 64, stages=3)],
    ),
}  # fmt: skip
"""16-bit weights; by rows of a block, tiles of the first and of the second GEMM, the likeliest first."""

_NARROW: _Pair = (
    [_tile(128, 128, 4, 3), _tile(128, 128, 4, 2), _tile(128, 128, 4, 4), _tile(128, 128, 8, 3)],
    [_tile(128, 128, 4, 4), _tile(128, 128, 4, 3), _tile(128, 128, 8, 4), _tile(256, 128, 4, 3)],
)
_FP8_TILES: dict[int, _Pair] = {
    16: _NARROW,
    32: _NARROW,
    64: (
        [
            _tile(128, 128, 8, 4), _tile(128, 128, 8, 5), _tile(128, 128, 8, 4, 1), _tile(128, 128, 8, 4, 1, 4),
            _tile(128, 128, 4, 2), _specialized(128, 128, stages=5),
        ],
        [
            _tile(128, 128, 4, 3), _tile(128, 128, 4, 4, 2), _tile(128, 128, 4, 4, 2, 8), _tile(128, 128, 4, 4),
            _tile(256, 128, 8, 4, 1, 4),
        ],
    ),
    128: ([_specialized(128, 128), _specialized(128, 128, group_rows=4)], [_specialized(256, 128)]),
}  # fmt: skip
"""A step is 128 deep and an accumulator 128 wide, because a scale is; blocks of more than 64 rows find registers in
specialised programs only."""

GATHERS_FROM = 48
"""Mean rows of an expert from which copying the rows first may pay."""


def untuned(shape: Shape, rows: int, gpu: Gpu = HOPPER) -> GemmTiles:
    """What runs without a table."""
    return choose_tiles(
        slots=rows * shape.K,
        num_experts=shape.E,
        hidden=shape.H,
        intermediate=shape.F,
        itemsize=1 if shape.fp8 else 2,
        shared_memory_bytes=gpu.shared_memory_bytes,
        specialize=gpu.can_specialize,
    )


def heights(shape: Shape, rows: int, gpu: Gpu = HOPPER) -> list[int]:
    """Rows of a block: not so many that blocks stay empty, not so few that weights are read again and again."""
    mean, tiles = rows * shape.K / shape.E, _FP8_TILES if shape.fp8 else _TILES
    there = [height for height, (gateds, _) in tiles.items() if any(map(gpu.has, gateds))]
    return [height for height in there if min(128, *there[-1:], mean / 2) <= height <= max(16, 3 * mean)]


def gathers(height: int) -> tuple[bool, ...]:
    """Whether rows may be gathered first for blocks of so many, the likelier first."""
    if height > 128:
        return (True,)
    return (False, True) if height >= 64 else (False,)


def first_round(shape: Shape, rows: int, gpu: Gpu = HOPPER) -> list[GemmTiles]:
    """The untuned tiles; for each height all tiles of the first GEMM, with the likeliest of the second."""
    tried = [untuned(shape, rows, gpu)]
    if rows <= 2:  # where the small-batch kernels are as good as sure to be faster
        return tried
    for height in heights(shape, rows, gpu):
        gateds, downs = tiles_of(shape, height, gpu)
        first, *others = gathers(height)
        of_height = [GemmTiles(height, gated, down, first) for down in downs[:1] for gated in gateds]
        if rows * shape.K >= GATHERS_FROM * shape.E:
            of_height += [replace(tiles, gather_first=gather) for tiles in of_height[:1] for gather in others]
        tried += of_height
    return list(dict.fromkeys(tried))


def second_round(shape: Shape, best: Sequence[GemmTiles], gpu: Gpu = HOPPER) -> list[GemmTiles]:
    """For each of `best` all tiles of the second GEMM, and the rows gathered first or not."""
    tried = []
    for tiles in best:
        _, downs = tiles_of(shape, tiles.block_rows, gpu)
        tried += [replace(tiles, down=down) for down in downs]
        tried += [replace(tiles, gather_first=gather) for gather in gathers(tiles.block_rows)]
    return [tiles for tiles in dict.fromkeys(tried) if tiles not in best]


def to_compile(shape: Shape, rows: Sequence[int], gpu: Gpu = HOPPER) -> list[GemmTiles]:
    """As few as hold every kernel that the cells with so many rows may try."""
    found = [untuned(shape, R, gpu) for R in rows]
    found += [replace(tiles, gather_first=gather) for tiles in found for gather in gathers(tiles.block_rows)]
    for height in sorted({height for R in rows if R > 2 for height in heights(shape, R, gpu)}):
        gateds, downs = tiles_of(shape, height, gpu)
        if gateds and downs:
            for gated, down in zip_longest(gateds, downs):
                found += [GemmTiles(height, gated or gateds[0], down or downs[0], gather) for gather in gathers(height)]
    return list(dict.fromkeys(found))


def tiles_of(shape: Shape, height: int, gpu: Gpu) -> _Pair:
    """Of both GEMMs, for blocks of so many rows, those that may fit."""
    gateds, downs = (_FP8_TILES if shape.fp8 else _TILES).get(height, ([], []))
    room = {"block_rows": height, "itemsize": 1 if shape.fp8 else 2, "shared_memory_bytes": gpu.shared_memory_bytes}
    return (
        [t for t in gateds if gpu.has(t) and may_fit(t, columns_per_output=2, **room)],
        [t for t in downs if gpu.has(t) and may_fit(t, columns_per_output=1, **room)],
    )

"""Which tiles the two grouped GEMMs use, as a function of the problem and nothing else.

What was measured for a GPU model, `tuned_tables` has; the function is for all that was not.

What decides is the mean number of rows per expert. Below about 48 the time is that of streaming every active expert's
weights once: a block holds all rows of most experts, so that few weights are read twice, and several narrow tiles per
multiprocessor stream at a time. Above, the matrix units decide: 128 x 256 products, one program per multiprocessor
that loads for its next tile while it stores the last; and, where the products are long enough to pay for the copy, rows
gathered beforehand, so that the copy engine can read them.

In fp8 a step is 128 deep and an accumulator 128 wide, because a scale is. The first GEMM has two of them, gate and up;
the second one or two.
"""

from dataclasses import dataclass, replace

import triton

HOPPER_SHARED_MEMORY_BYTES = 227 * 1024
"""Of one program."""

_EPILOGUE_BYTES = 32 * 1024
"""Shared memory through which a tile is turned into rows to store, as the compiler reports it for the largest tiles."""


@dataclass(frozen=True, slots=True)
class GemmTile:
    """One grouped GEMM.

    Attributes:
        block_columns: output columns per program; of the gated GEMM, columns after the activation.
        block_depth: elements of the summed dimension per step.
        group_rows: blocks of rows that run side by side over all columns.
        programs_per_sm: of a persistent grid, which loads for the next tile while it stores the last; 0: one program
            per tile.
        specialized: some warps only load and others only multiply, see `specialized_gemm`; then blocks have 64 or 128
            rows, or 192 in 16 bits if they are gathered first, a step 128 bytes, the first GEMM 128 columns and the
            second 256, and the grid is persistent.
    """

    block_columns: int
    block_depth: int
    group_rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 0
    specialized: bool = False


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Both grouped GEMMs; they share the blocks of rows that `align_rows` cut."""

    block_rows: int
    gated: GemmTile
    down: GemmTile
    gather_first: bool = False  # copy the rows into the order of the experts before the gated GEMM

    @property
    def specialized(self) -> bool:
        """Whether either needs a device that `can_specialize`."""
        return self.gated.specialized or self.down.specialized


def choose_tiles(
    *,
    slots: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    shared_memory_bytes: int = HOPPER_SHARED_MEMORY_BYTES,
    specialize: bool = False,
    tuned: GemmTiles | None = None,
) -> GemmTiles:
    """Pure and CPU-testable; the launchers take no other decision.

    The limits were measured on an H200: benchmarks/notes_experts.md. Other devices get the same tiles, cut to fit.

    Args:
        itemsize: bytes of an element of the weights.
        specialize: whether the GEMMs `can_specialize`.
        tuned: what a table of this GPU has for the problem, which is taken as it is, unless it is specialised and these
            GEMMs cannot be; None: nothing.
    """
    if tuned is not None and (specialize or not tuned.specialized):
        return tuned
    mean_rows = slots / max(1, num_experts)
    if itemsize == 1:
        tiles = _choose_fp8_tiles(mean_rows, intermediate=intermediate, room=shared_memory_bytes - _EPILOGUE_BYTES)
        return _specialized_fp8(tiles, mean_rows) if specialize else tiles
    specialize = specialize and itemsize == 2
    if specialize and mean_rows >= 192 and intermediate < 4096:
        return GemmTiles(128, gated=_SPECIALIZED, down=replace(_SPECIALIZED, block_columns=256))
    if specialize and 96 <= mean_rows < 192 and intermediate >= 4096:
        gated = replace(_SPECIALIZED, group_rows=1, num_stages=3)
        return GemmTiles(192, gated=gated, down=replace(gated, block_columns=256), gather_first=True)
    if mean_rows >= 48:
        wide = GemmTile(256, 64, group_rows=8, num_warps=8, num_stages=4, programs_per_sm=1)
        tiles = GemmTiles(
            block_rows=128,
            gated=replace(wide, block_columns=128),
            down=wide if mean_rows >= 192 else replace(wide, block_columns=128, num_stages=6),
            gather_first=mean_rows >= 192 and intermediate >= 1024,
        )
    elif mean_rows >= 24:
        tiles = GemmTiles(
            block_rows=64,
            gated=GemmTile(64, 128, group_rows=1, num_warps=8, num_stages=4, programs_per_sm=1),
            down=GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=4, programs_per_sm=1),
        )
    elif mean_rows > 8:
        tiles = GemmTiles(
            block_rows=32,
            gated=GemmTile(64, 128, group_rows=1, num_warps=4, num_stages=3),
            down=GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=3),
        )
    else:
        tiles = GemmTiles(
            block_rows=16,
            gated=GemmTile(32, 256, group_rows=1, num_warps=4, num_stages=3),
            # Where the sums are short, the columns are wide.
            down=GemmTile(64, 256, group_rows=1, num_warps=4, num_stages=5)
            if intermediate >= 1024
            else GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=3),
        )
    if itemsize > 2:
        tiles = _for_wide_elements(tiles, hidden=hidden, intermediate=intermediate)
    room = shared_memory_bytes - _EPILOGUE_BYTES
    return replace(
        tiles,
        gated=_cut(tiles.gated, block_rows=tiles.block_rows, columns_per_output=2, room=room // itemsize),
        down=_cut(tiles.down, block_rows=tiles.block_rows, columns_per_output=1, room=room // itemsize),
    )


def may_fit(
    tile: GemmTile, *, block_rows: int, columns_per_output: int, itemsize: int, shared_memory_bytes: int
) -> bool:
    """Whether all stages find room in one program; what the epilogue needs comes on top, or overlaps them.

    Args:
        columns_per_output: 2 for the gated GEMM, which has gates and ups; else 1.
    """
    stage = (block_rows + columns_per_output * tile.block_columns) * tile.block_depth * itemsize
    return stage * tile.num_stages <= shared_memory_bytes


def _cut(tile: GemmTile, *, block_rows: int, columns_per_output: int, room: int) -> GemmTile:
    """The same with fewer stages, then fewer columns, until `room` elements hold all stages."""

    def size(tile: GemmTile) -> int:
        return (block_rows + columns_per_output * tile.block_columns) * tile.block_depth * tile.num_stages

    while size(tile) > room and tile.num_stages > 2:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while size(tile) > room and tile.block_columns > 16:
        tile = replace(tile, block_columns=tile.block_columns // 2)
    return tile


def _choose_fp8_tiles(mean_rows: float, *, intermediate: int, room: int) -> GemmTiles:
    if mean_rows >= 24:  # blocks of 128 rows need more registers than there are
        persistent = mean_rows < 96
        down = GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=3)
        if persistent or intermediate < 1024:  # short sums: two programs hide each other's first loads and last stores
            down = replace(down, group_rows=1 if persistent else 8, num_stages=4, programs_per_sm=2)
        tiles = GemmTiles(
            block_rows=64,
            gated=GemmTile(
                128, 128, group_rows=1, num_warps=8, num_stages=4 if persistent else 5, programs_per_sm=int(persistent)
            ),
            down=down,
        )
    else:
        tiles = GemmTiles(
            block_rows=32 if mean_rows > 8 else 16,
            gated=GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=3),
            down=GemmTile(128, 128, group_rows=1, num_warps=4, num_stages=4),
        )
    rows = tiles.block_rows
    return replace(
        tiles,
        gated=_cut_stages(tiles.gated, stage_bytes=(rows + 2 * tiles.gated.block_columns) * 128, room=room),
        down=_cut_stages(tiles.down, stage_bytes=(rows + tiles.down.block_columns) * 128, room=room),
    )


_SPECIALIZED = GemmTile(128, 64, group_rows=8, num_warps=4, num_stages=4, programs_per_sm=1, specialized=True)


def _specialized_fp8(tiles: GemmTiles, mean_rows: float) -> GemmTiles:
    """With the specialised GEMMs where they are faster."""
    gated = replace(_SPECIALIZED, block_depth=128)
    if mean_rows >= 96:
        return GemmTiles(128, gated=gated, down=replace(gated, block_columns=256))
    return replace(tiles, gated=replace(gated, num_stages=5)) if mean_rows >= 24 else tiles


def _cut_stages(tile: GemmTile, *, stage_bytes: int, room: int) -> GemmTile:
    return replace(tile, num_stages=max(1, min(tile.num_stages, room // stage_bytes)))


def _for_wide_elements(tiles: GemmTiles, *, hidden: int, intermediate: int) -> GemmTiles:
    """float32, which only tests use: small tiles that fit in shared memory anywhere."""

    def narrow(depth: int) -> GemmTile:
        block_depth = min(32, max(16, triton.next_power_of_2(depth)))
        return GemmTile(32, block_depth, group_rows=1, num_warps=4, num_stages=2)

    return GemmTiles(min(32, tiles.block_rows), gated=narrow(hidden), down=narrow(intermediate))

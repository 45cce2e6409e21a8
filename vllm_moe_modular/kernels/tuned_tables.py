"""Tuned tables: what was measured to be the fastest, by GPU model, shape of the experts and number of rows.

One JSON file for each GPU model, made by `vllm-moe-modular tune`; those of this package are in `tuned/` beside this
file. What has no table, or a shape that a table has not, is decided by `choose_tiles` alone, without a word.

    {"gpu": "NVIDIA H200", "made_with": {"triton": "3.6.0", ...}, "shapes": [
        {"weights": "fp8 128x128", "E": 128, "K": 8, "H": 2048, "F": 768, "cells": [
            {"rows": 512, "grouped_gemm_us": 185.25, "untuned_us": 185.25, "deep_gemm_us": 227.33, "tiles": {
                "block_rows": 64, "gather_first": false, "gated": {"block_columns": 128, ...}, "down": {...}}}]}]}

Letters: R rows, K top-k, H hidden, F expert intermediate, E local experts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.kernels.launch import gpu_name
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.fp8 import BLOCK

FOLDER = Path(__file__).with_name("tuned")
"""The tables of this package."""

FARTHEST = 2
"""A cell holds for at most so many times as many or as few rows: cells a factor of four apart leave no gap."""


MOST_ROWS = 1 << 24
"""Of a cell."""

MOST_US = 1e12

WEIGHTS = ("bfloat16", "float16", "float32", f"fp8 {BLOCK}x{BLOCK}", "fp8 per channel")
"""As `weights_scheme` names them."""


class TunedTableError(MoEModularError, ValueError):
    """A tuned table cannot be read, or says something that no table can say; names the file and the key."""


@dataclass(frozen=True, slots=True)
class TunedShape:
    """What a table is asked for.

    Attributes:
        weights: as `weights_scheme` names them.
    """

    weights: str
    E: int
    K: int
    H: int
    F: int


@dataclass(frozen=True, slots=True)
class TunedCell:
    """One number of rows of one shape; microseconds of the whole layer.

    Attributes:
        tiles: of the grouped GEMMs, the fastest that were tried.
        grouped_gemm_us: with these tiles.
        untuned_us: with those of `choose_tiles`.
        small_batch_us: slot by slot; None: not tried.
        deep_gemm_us: on DeepGEMM, in fp8; None: not tried.
    """

    rows: int
    tiles: GemmTiles
    grouped_gemm_us: float
    untuned_us: float | None = None
    small_batch_us: float | None = None
    deep_gemm_us: float | None = None

    def goes_slot_by_slot(self, rows: int, otherwise: bool) -> bool:
        """Whether the small-batch kernels are the faster: for fewer rows too if they are, for more if they are not.

        Args:
            rows: of the call, which need not be those of this cell.
            otherwise: where this cell does not say.
        """
        if self.small_batch_us is None:
            return otherwise
        faster = self.small_batch_us < self.grouped_gemm_us
        return faster if (rows <= self.rows if faster else rows >= self.rows) else otherwise

    def prefers_deep_gemm(self, otherwise: bool) -> bool:
        """Whether DeepGEMM is the faster; `otherwise` where it was not tried."""
        if self.deep_gemm_us is None:
            return otherwise
        return self.deep_gemm_us < min(self.grouped_gemm_us, self.small_batch_us or self.grouped_gemm_us)


@dataclass(frozen=True, slots=True)
class TunedTable:
    """Of one GPU model.

    Attributes:
        shapes: with their cells, ascending rows.
        made_with: versions, for people.
    """

    gpu: str = ""
    shapes: Mapping[TunedShape, Sequence[TunedCell]] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)

    def cell(self, shape: TunedShape, rows: int) -> TunedCell | None:
        """For a call with so many rows: the nearest by ratio to the next power of two; None: the table has none.

        The same from one power of two to the next, so that a workspace that is large enough for those is for all.
        """
        wanted = 1 << max(0, rows - 1).bit_length()

        def ratio(cell: TunedCell) -> float:
            return max(cell.rows / wanted, wanted / cell.rows)

        nearest = min(self.shapes.get(shape, ()), key=ratio, default=None)
        return nearest if nearest is not None and ratio(nearest) <= FARTHEST else None

    def with_cell(self, shape: TunedShape, cell: TunedCell) -> "TunedTable":
        """The same, with this cell in the place of one of as many rows."""
        cells = {c.rows: c for c in self.shapes.get(shape, ())} | {cell.rows: cell}
        ascending = tuple(cells[rows] for rows in sorted(cells))
        return TunedTable(self.gpu, {**self.shapes, shape: ascending}, self.made_with)


NO_TABLE = TunedTable()


def weights_scheme(weights: ExpertWeights) -> str:
    """What a table calls weights of this kind: a dtype, or fp8 with its scales."""
    if weights.w13_scale is None:
        return str(weights.w13.dtype).removeprefix("torch.")
    return f"fp8 {BLOCK}x{BLOCK}" if weights.w13_scale.dim() == 3 else "fp8 per channel"


def tuned_shape(weights: ExpertWeights, top_k: int) -> TunedShape:
    """What to ask a table for these weights."""
    E, H, F = weights.w2.shape
    return TunedShape(weights_scheme(weights), E=E, K=top_k, H=H, F=F)


def file_name(gpu: str) -> str:
    """Of the table of a GPU model, as torch names the model."""
    return re.sub(r"[^\w.-]+", "_", gpu) + ".json"


def tuned_table(device: torch.device, folder: str | None = None) -> TunedTable:
    """The table for a device: that of the package, and over it, shape by shape, the one in `folder`.

    Raises:
        TunedTableError: `folder` is none, or a table is malformed or of another GPU model.
    """
    return _tables(gpu_name(device), folder)


@cache
def _tables(gpu: str, folder: str | None) -> TunedTable:
    if folder is not None and not Path(folder).is_dir():
        raise TunedTableError(f"{folder}, named as the folder of tuned tables, is not a folder")
    tables = [
        _table_of(gpu, file)
        for parent in (FOLDER, *([Path(folder)] if folder is not None else []))
        if gpu and (file := parent / file_name(gpu)).is_file()
    ]
    return TunedTable(gpu, {shape: cells for table in tables for shape, cells in table.shapes.items()})


def _table_of(gpu: str, file: Path) -> TunedTable:
    table = read_table(file)
    if table.gpu != gpu:
        raise TunedTableError(
            f"{file}: gpu is {table.gpu!r}, and the file is read for {gpu!r}; take it away, or make the table of this "
            "GPU with vllm-moe-modular tune"
        )
    return table


def read_table(file: Path) -> TunedTable:
    """A table out of its file.

    Raises:
        TunedTableError: it is malformed; names the file and the key.
    """
    try:
        top = _Place(file, "", json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        told = f"{file} is not a tuned table: {error}; make it again with vllm-moe-modular tune"
        raise TunedTableError(told) from error
    top.require_keys({"gpu", "shapes"}, {"made_with"})
    shapes: dict[TunedShape, tuple[TunedCell, ...]] = {}
    for place in top.of("shapes").items():
        place.require_keys({f.name for f in fields(TunedShape)} | {"cells"}, set())
        if place.of("weights").text() not in WEIGHTS:
            raise place.of("weights").wrong(f"takes one of {', '.join(WEIGHTS)}")
        shape = TunedShape(place.value["weights"], **{n: place.of(n).whole() for n in ("E", "K", "H", "F")})
        cells = [_cell(c, is_fp8=shape.weights.startswith("fp8")) for c in place.of("cells").items()]
        if not cells:
            raise place.of("cells").wrong("takes one cell or more")
        if len({cell.rows for cell in cells}) < len(cells):
            raise place.of("cells").wrong("takes each number of rows once")
        if shape in shapes:
            raise place.wrong("takes each shape once")
        shapes[shape] = tuple(sorted(cells, key=lambda cell: cell.rows))
    made_with = top.value.get("made_with", {})
    if not isinstance(made_with, dict):
        raise top.of("made_with").wrong("takes an object")
    return TunedTable(top.of("gpu").text(), shapes, made_with)


def write_table(file: Path, table: TunedTable) -> None:
    """The other direction; the file is never seen half written.

    Raises:
        TunedTableError: the file cannot be written.
    """
    shapes = [asdict(shape) | {"cells": [_as_json(cell) for cell in cells]} for shape, cells in table.shapes.items()]
    text = json.dumps({"gpu": table.gpu, "made_with": dict(table.made_with), "shapes": shapes}, indent=1)
    half = _half_written(file)
    try:
        half.write_text(_one_line_per_tile(text) + "\n", encoding="utf-8")
        half.replace(file)
    except OSError as error:
        raise _unwritable(file, error) from error


def _as_json(cell: TunedCell) -> dict[str, Any]:
    """Microseconds to a hundredth."""
    known = {k: v for k, v in asdict(cell).items() if v is not None}
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in known.items()}


def require_writable(file: Path) -> None:
    """Before minutes are spent on a table that cannot be kept.

    Raises:
        TunedTableError: the file cannot be written.
    """
    half = _half_written(file)
    try:
        half.write_text("", encoding="utf-8")
        half.unlink()
    except OSError as error:
        raise _unwritable(file, error) from error


def _half_written(file: Path) -> Path:
    return file.with_name(f".{file.name}.part")


def _unwritable(file: Path, error: OSError) -> TunedTableError:
    return TunedTableError(f"{file} cannot be written: {error.strerror}; name a file in a folder that can be")


def _one_line_per_tile(text: str) -> str:
    """Objects without objects inside on one line each, so that a difference of two tables can be read."""
    return re.sub(r"\{[^{}\[\]]*\}", lambda found: " ".join(found[0].split()), text)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of a file, and the key that leads to it."""

    file: Path
    key: str
    value: Any

    def wrong(self, takes: str) -> TunedTableError:
        try:
            told = json.dumps(self.value)
        except RecursionError:
            told = "what is nested so deeply"
        return TunedTableError(
            f"{self.file}: {self.key or 'the whole'} {takes}, not {told if len(told) < 80 else told[:77] + '...'}; "
            "mend it, or make the table again with vllm-moe-modular tune"
        )

    def require_keys(self, needed: set[str], optional: set[str]) -> None:
        if not isinstance(self.value, dict):
            raise self.wrong("takes an object")
        for name in needed - self.value.keys():
            raise self.wrong(f"takes a key {name!r}")
        for name in self.value.keys() - needed - optional:
            raise self.of(name).wrong("is a key that no table has")

    def of(self, name: str) -> "_Place":
        return _Place(self.file, f"{self.key}.{name}".lstrip("."), self.value[name])

    def items(self) -> list["_Place"]:
        if not isinstance(self.value, list):
            raise self.wrong("takes a list")
        return [_Place(self.file, f"{self.key}[{i}]", value) for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("takes text")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("takes true or false")
        return self.value

    def whole(self, least: int = 1, most: int | None = None) -> int:
        good = isinstance(self.value, int) and not isinstance(self.value, bool) and self.value >= least
        if not good or (most is not None and self.value > most):
            raise self.wrong(f"takes a whole number, {least} {'or more' if most is None else f'to {most}'}")
        return int(self.value)

    def power_of_two(self, least: int, most: int) -> int:
        if self.whole(least, most).bit_count() != 1:
            raise self.wrong(f"takes a power of two, {least} to {most}")
        return int(self.value)

    def us(self) -> float:
        good = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not good or not 0 < self.value < MOST_US:
            raise self.wrong(f"takes microseconds, more than 0 and less than {MOST_US:g}")
        return float(self.value)


def _cell(place: _Place, *, is_fp8: bool) -> TunedCell:
    optional = {"untuned_us", "small_batch_us", "deep_gemm_us"}
    place.require_keys({"rows", "tiles", "grouped_gemm_us"}, optional)
    return TunedCell(
        rows=place.of("rows").power_of_two(1, MOST_ROWS),
        tiles=_tiles(place.of("tiles"), is_fp8=is_fp8),
        grouped_gemm_us=place.of("grouped_gemm_us").us(),
        **{name: place.of(name).us() for name in optional & place.value.keys()},
    )


def _tiles(place: _Place, *, is_fp8: bool) -> GemmTiles:
    place.require_keys({"block_rows", "gated", "down"}, {"gather_first"})
    block_rows = place.of("block_rows")
    tiles = GemmTiles(
        block_rows=192 if block_rows.value == 192 else block_rows.power_of_two(16, 1024),
        gated=_tile(place.of("gated"), fp8_columns=(BLOCK,) if is_fp8 else ()),
        down=_tile(place.of("down"), fp8_columns=(BLOCK, 2 * BLOCK) if is_fp8 else ()),
        gather_first="gather_first" in place.value and place.of("gather_first").flag(),
    )
    # What a specialised GEMM does not take it would hang on.
    if tiles.specialized and tiles.block_rows not in (64, 128, 192):
        raise block_rows.wrong("takes 64, 128 or 192 with a specialized tile")
    both = tiles.gated.specialized and tiles.down.specialized
    if tiles.block_rows == 192 and (is_fp8 or not both or not tiles.gather_first):
        raise block_rows.wrong("takes 192 only in 16 bits, with gather_first and both tiles specialized")
    for name, tile, columns in (("gated", tiles.gated, 128), ("down", tiles.down, 256)):
        fits = tile.block_columns == columns and tile.block_depth == (128 if is_fp8 else 64)
        if tile.specialized and not (fits and tile.num_stages >= 2 and tile.programs_per_sm == 1):
            raise place.of(name).wrong(
                f"takes, if specialized, block_columns of {columns}, 128 bytes of block_depth, 2 or more num_stages "
                "and programs_per_sm of 1"
            )
    return tiles


def _tile(place: _Place, *, fp8_columns: tuple[int, ...]) -> GemmTile:
    """fp8_columns: what a scale allows; empty: there are none."""
    optional = {"programs_per_sm", "specialized"}
    place.require_keys({f.name for f in fields(GemmTile)} - optional, optional)
    columns, depth = place.of("block_columns"), place.of("block_depth")
    if fp8_columns and (columns.value not in fp8_columns or depth.value != BLOCK):
        raise place.wrong(f"takes, in fp8, a block_depth of {BLOCK} and block_columns of {fp8_columns}")
    return GemmTile(
        block_columns=columns.power_of_two(16, 4096),
        block_depth=depth.power_of_two(16, 4096),
        group_rows=place.of("group_rows").whole(),
        num_warps=place.of("num_warps").power_of_two(1, 32),
        num_stages=place.of("num_stages").whole(1, 64),
        programs_per_sm=place.of("programs_per_sm").whole(0) if "programs_per_sm" in place.value else 0,
        specialized="specialized" in place.value and place.of("specialized").flag(),
    )

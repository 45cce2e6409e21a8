"""kernels.tuned_tables: written, read, asked; and what a table that is none says. Needs no GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_moe_modular.bench.shapes import BF16, FP8
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.kernels import tuned_tables
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles, choose_tiles
from vllm_moe_modular.kernels.tuned_tables import (
    NO_TABLE,
    TunedCell,
    TunedShape,
    TunedTable,
    TunedTableError,
    file_name,
    read_table,
    tuned_shape,
    tuned_table,
    weights_scheme,
    write_table,
)
from vllm_moe_modular.modular.experts import ExpertWeights

SHAPE = TunedShape(BF16, E=128, K=8, H=2048, F=768)
TILES = GemmTiles(64, gated=GemmTile(64, 64, 1, 4, 3), down=GemmTile(128, 64, 8, 4, 4, 1), gather_first=True)


def cell(rows: int, grouped_gemm_us: float = 10.0, **more: float) -> TunedCell:
    return TunedCell(rows, TILES, grouped_gemm_us, **more)


def table(*cells: TunedCell) -> TunedTable:
    made = TunedTable("NVIDIA H200", {}, {"triton": "3.6.0"})
    for c in cells:
        made = made.with_cell(SHAPE, c)
    return made


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = table(cell(512, small_batch_us=12.5), cell(1, untuned_us=3.0, deep_gemm_us=2.0))
    file = tmp_path / "table.json"
    write_table(file, written)
    assert read_table(file) == written
    assert [c.rows for c in written.shapes[SHAPE]] == [1, 512], "ascending"
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert '"gated": {' in file.read_text()
    assert max(map(len, file.read_text().splitlines())) < 300, "a tile to a line, the rest below each other"


def test_a_cell_of_as_many_rows_is_replaced() -> None:
    assert table(cell(8, 10.0), cell(8, 9.0)).shapes[SHAPE] == (cell(8, 9.0),)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (1, None), (7, 8), (8, 8), (9, 8), (16, 8), (17, 32), (32, 32), (64, 32), (65, 128), (128, 128), (129, 128),
        (256, 128), (257, None), (100_000, None),
    ],
)  # fmt: skip
def test_the_nearest_cell_holds_for_twice_and_half_as_many_rows(rows: int, found: int | None) -> None:
    got = table(cell(8), cell(32), cell(128)).cell(SHAPE, rows)
    assert (got.rows if got else None) == found


def test_one_choice_from_one_power_of_two_to_the_next() -> None:
    """A workspace that was reserved for the powers of two is large enough for all between."""
    made = table(cell(6), cell(24), cell(100))
    for high in (8, 16, 32, 64, 128):
        assert len({made.cell(SHAPE, rows) for rows in range(high // 2 + 1, high + 1)}) == 1


def test_what_has_no_table_is_chosen_as_before() -> None:
    problem: dict[str, Any] = {"slots": 4096, "num_experts": 128, "hidden": 2048, "intermediate": 768, "itemsize": 2}
    assert NO_TABLE.cell(SHAPE, 512) is None
    assert table(cell(512)).cell(replace(SHAPE, F=1536), 512) is None
    assert choose_tiles(**problem, tuned=None) == choose_tiles(**problem)
    assert choose_tiles(**problem, tuned=TILES) == TILES


@pytest.mark.parametrize(
    ("small_us", "rows", "otherwise", "slot_by_slot"),
    [
        (9.0, 4, False, True), (9.0, 3, False, True), (9.0, 5, False, False), (9.0, 5, True, True),
        (11.0, 4, True, False), (11.0, 5, True, False), (11.0, 3, True, True), (11.0, 3, False, False),
    ],
)  # fmt: skip
def test_fewer_rows_go_slot_by_slot_where_more_do(
    small_us: float, rows: int, otherwise: bool, slot_by_slot: bool
) -> None:
    assert cell(4, small_batch_us=small_us).goes_slot_by_slot(rows, otherwise) is slot_by_slot


@pytest.mark.parametrize("untuned", [True, False])
def test_the_faster_kernel_runs_where_both_were_measured(untuned: bool) -> None:
    assert cell(512, deep_gemm_us=9.9).prefers_deep_gemm(untuned)
    assert not cell(512, deep_gemm_us=10.1).prefers_deep_gemm(untuned)
    assert cell(512).prefers_deep_gemm(untuned) is untuned
    assert not cell(4, deep_gemm_us=9.5, small_batch_us=9.0).prefers_deep_gemm(untuned)


def test_weights_are_named_as_the_benchmarks_name_them() -> None:
    w = ExpertWeights(w13=torch.empty(4, 256, 128, dtype=torch.bfloat16), w2=torch.empty(4, 128, 128))
    assert weights_scheme(w) == BF16
    assert tuned_shape(w, 2) == TunedShape(BF16, E=4, K=2, H=128, F=128)
    blocks, channels = torch.empty(4, 2, 1), torch.empty(4, 256)
    assert weights_scheme(replace(w, w13_scale=blocks)) == FP8
    assert weights_scheme(replace(w, w13_scale=channels)) == "fp8 per channel"


def test_a_folder_goes_before_the_package_shape_by_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(SHAPE, F=1536)
    own, theirs = tmp_path / "package", tmp_path / "folder"
    for folder, made in ((own, table(cell(8, 1.0)).with_cell(other, cell(8, 2.0))), (theirs, table(cell(8, 3.0)))):
        folder.mkdir()
        write_table(folder / "NVIDIA_H200.json", made)
    monkeypatch.setattr(tuned_tables, "FOLDER", own)
    monkeypatch.setattr(tuned_tables, "gpu_name", lambda device: "NVIDIA H200")  # noqa: ARG005
    tuned_tables._tables.cache_clear()
    device = torch.device("cpu")
    both, alone = tuned_table(device, str(theirs)), tuned_table(device)
    assert [both.shapes[s][0].grouped_gemm_us for s in (SHAPE, other)] == [3.0, 2.0]
    assert alone.shapes[SHAPE][0].grouped_gemm_us == 1.0
    tuned_tables._tables.cache_clear()


def test_a_folder_that_is_none_is_an_error_and_a_missing_table_is_none(tmp_path: Path) -> None:
    with pytest.raises(TunedTableError, match=r"missing.*is not a folder"):
        tuned_table(torch.device("cpu"), str(tmp_path / "missing"))
    assert not tuned_table(torch.device("cpu"), str(tmp_path)).shapes


def test_a_table_of_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "NVIDIA_H100.json", table(cell(8)))
    monkeypatch.setattr(tuned_tables, "gpu_name", lambda device: "NVIDIA H100")  # noqa: ARG005
    with pytest.raises(TunedTableError, match=r"NVIDIA_H100.json: gpu is 'NVIDIA H200', and the file is read for"):
        tuned_table(torch.device("cpu"), str(tmp_path))


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TunedTableError, match=r"/proc/x.json cannot be written"):
        write_table(Path("/proc/x.json"), table(cell(8)))


def test_gpu_names_are_file_names() -> None:
    assert file_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert file_name("NVIDIA H100 80GB HBM3 / MIG") == "NVIDIA_H100_80GB_HBM3_MIG.json"


def good() -> dict[str, Any]:
    tile = {"block_columns": 128, "block_depth": 128, "group_rows": 1, "num_warps": 4, "num_stages": 3}
    tiles = {"block_rows": 64, "gated": dict(tile), "down": dict(tile)}
    cells = [{"rows": 8, "grouped_gemm_us": 5.0, "tiles": tiles}]
    return {"gpu": "NVIDIA H200", "shapes": [{"weights": FP8, "E": 8, "K": 2, "H": 256, "F": 128, "cells": cells}]}


def with_value(path: str, value: Any) -> dict[str, Any]:
    """`good`, changed at one place; None takes the key away."""
    top: Any = good()
    at, keys = top, [int(key) if key.isdecimal() else key for key in path.split("/")]
    for key in keys[:-1]:
        at = at[key]
    if value is None:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return dict(top)


CELL = "shapes/0/cells/0"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("gpu", 3, "gpu takes text"),
        ("gpu", None, "the whole takes a key 'gpu'"),
        ("shapes", {}, "shapes takes a list"),
        ("shapes/0/E", "8", r"shapes\[0\].E takes a whole number, 1 or more, not \"8\""),
        ("shapes/0/K", True, r"shapes\[0\].K takes a whole number"),
        (f"{CELL}/rows", 0, r"shapes\[0\].cells\[0\].rows takes a whole number"),
        (f"{CELL}/grouped_gemm_us", float("nan"), r"cells\[0\].grouped_gemm_us takes microseconds"),
        (f"{CELL}/rows", 12, r"cells\[0\].rows takes a power of two"),
        (f"{CELL}/grouped_gemm_us", 10**400, r"cells\[0\].grouped_gemm_us takes microseconds"),
        (f"{CELL}/tiles/block_rows", 2048, r"tiles.block_rows takes a whole number, 16 to 1024"),
        (f"{CELL}/tiles/gated/num_warps", 64, r"num_warps takes a whole number, 1 to 32"),
        (f"{CELL}/tiles/gated/num_stages", 65, r"num_stages takes a whole number, 1 to 64"),
        ("made_with", [], "made_with takes an object"),
        ("shapes/0/cells", [], r"cells takes one cell or more"),
        ("shapes/0/weights", "int4", r"weights takes one of bfloat16"),
        (f"{CELL}/deep_gemm_us", 0, r"cells\[0\].deep_gemm_us takes microseconds"),
        (f"{CELL}/tiles/block_rows", 48, r"tiles.block_rows takes a power of two"),
        (f"{CELL}/tiles/gather_first", 1, r"tiles.gather_first takes true or false"),
        (f"{CELL}/tiles/gated/num_warps", 3, r"tiles.gated.num_warps takes a power of two"),
        (f"{CELL}/tiles/gated/block_columns", 256, r"tiles.gated takes, in fp8, a block_depth of 128"),
        (f"{CELL}/tiles/down/block_depth", 64, r"tiles.down takes, in fp8"),
        (f"{CELL}/tiles/down/num_stages", None, r"tiles.down takes a key 'num_stages'"),
        (f"{CELL}/tiles/down/stages", 3, r"tiles.down.stages is a key that no table has"),
        ("shapes/0/cells", [good()["shapes"][0]["cells"][0]] * 2, r"cells takes each number of rows once"),
        ("shapes", good()["shapes"] * 2, r"shapes\[1\] takes each shape once"),
    ],
)
def test_a_malformed_table_names_file_and_key(path: str, value: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(good()))
    read_table(file)
    file.write_text(json.dumps(with_value(path, value)))
    with pytest.raises(TunedTableError, match=rf"{file}: .*{says}"):
        read_table(file)


def specialized(weights: str, **changes: Any) -> dict[str, Any]:
    """`good` with both tiles specialised, and what a GEMM would hang on, or not run."""
    top = good()
    top["shapes"][0]["weights"] = weights
    tiles = top["shapes"][0]["cells"][0]["tiles"]
    depth = 128 if weights == FP8 else 64
    for name, columns in (("gated", 128), ("down", 256)):
        tiles[name] |= {"block_columns": columns, "block_depth": depth, "programs_per_sm": 1, "specialized": True}
    tiles |= {"block_rows": changes.pop("block_rows", 128), "gather_first": changes.pop("gather_first", False)}
    tiles["gated"] |= changes
    return top


@pytest.mark.parametrize("weights", [FP8, BF16])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_stages": 1}, r"tiles.gated takes, if specialized, .*2 or more num_stages"),
        ({"block_columns": 64}, r"tiles.gated takes"),
        ({"programs_per_sm": 2}, r"tiles.gated takes, if specialized"),
        ({"block_rows": 32}, r"tiles.block_rows takes 64, 128 or 192 with a specialized tile"),
        ({"block_rows": 192}, r"tiles.block_rows takes 192 only in 16 bits, with gather_first"),
        ({"block_rows": 192, "gather_first": True, "specialized": False}, r"tiles.block_rows takes 192 only"),
    ],
)
def test_a_specialized_tile_that_would_hang_is_refused(
    weights: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(specialized(weights)))
    read_table(file)
    file.write_text(json.dumps(specialized(weights, **changes)))
    with pytest.raises(TunedTableError, match=rf"{file}: .*{says}"):
        read_table(file)


def test_blocks_of_192_rows_come_back(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(specialized(BF16, block_rows=192, gather_first=True)))
    made = read_table(file)
    write_table(tmp_path / "again.json", made)
    assert read_table(tmp_path / "again.json") == made
    file.write_text(json.dumps(specialized(FP8, block_rows=192, gather_first=True)))
    with pytest.raises(TunedTableError, match="takes 192 only in 16 bits"):
        read_table(file)


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "9" * 5000])
def test_what_is_no_json_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(MoEModularError, match=f"{file} is not a tuned table"):
        read_table(file)


def test_tables_of_the_package_are_sound() -> None:
    for file in tuned_tables.FOLDER.glob("*.json"):
        made = read_table(file)
        assert file.name == file_name(made.gpu)
        assert made.shapes

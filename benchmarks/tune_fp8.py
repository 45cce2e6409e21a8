"""Which tiles the fp8 grouped GEMMs should use: every candidate of one point in turns, on one H200.

    python -m benchmarks.tune_fp8 --out tiles.jsonl [--models ...] [--tokens 8 32 ...] [--seconds 150] [--rounds 7]

Whole layers are timed, in CUDA graphs. First the tiles of the first GEMM differ, then, with the best of them, those of
the second. Compiling takes most of the time, so that as many processes as --compilers says fill Triton's cache before
anything is timed. One JSON line per candidate.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from benchmarks.experts import FP8_MODELS
from benchmarks.harness import (
    SHAPES,
    Shape,
    captured,
    machine,
    random_steps,
    random_weights,
    roof_us,
    steps_to_rotate,
    time_in_turns,
)
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles, choose_tiles
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace

TOKENS = (512, 128, 32, 2048, 8, 1024)


def _tile(columns: int, warps: int, stages: int, per_sm: int = 0, group_rows: int = 1) -> GemmTile:
    return GemmTile(columns, 128, group_rows, warps, stages, per_sm)


_NARROW = (
    [_tile(128, 4, 3), _tile(128, 4, 2), _tile(128, 4, 4), _tile(128, 8, 3), _tile(128, 4, 3, per_sm=2)],
    [_tile(128, 4, 4), _tile(128, 4, 3), _tile(128, 4, 6), _tile(128, 8, 4), _tile(256, 4, 3)],
)
CANDIDATES: dict[int, tuple[list[GemmTile], list[GemmTile]]] = {
    16: _NARROW,
    32: _NARROW,
    64: (
        [_tile(128, 8, 4), _tile(128, 4, 2), _tile(128, 8, 5), _tile(128, 8, 4, per_sm=1), _tile(128, 8, 4, 1, 4)],
        [_tile(128, 4, 3), _tile(128, 4, 4), _tile(256, 8, 4), _tile(128, 8, 4), _tile(256, 8, 4, 1, 4)],
    ),
    128: (
        [_tile(128, 8, 4, 1, 8), _tile(128, 8, 3, 1, 8), _tile(128, 8, 4, 0, 8), _tile(128, 8, 4, 1, 1)],
        [_tile(256, 8, 4, 1, 8), _tile(256, 8, 3, 1, 8), _tile(128, 8, 4, 1, 8), _tile(256, 8, 4, 0, 8)],
    ),
}
"""By rows of a block: tiles of the first and of the second GEMM."""


def heights(mean_rows: float) -> list[int]:
    """Which blocks of rows are worth a try."""
    return [r for r in CANDIDATES if r <= max(16, 3 * mean_rows) and r >= min(64, mean_rows / 2)]


def layer(tiles: GemmTiles, shape: Shape, weights: ExpertWeights, workspace: Workspace, rows: StandardRows) -> None:
    experts = TritonExperts(shape.activation, tiles=tiles)
    experts.apply(
        rows, weights, workspace=workspace(experts.workspace(rows, weights)),
        weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False,
    )  # fmt: skip


def all_tiles() -> list[GemmTiles]:
    return [
        GemmTiles(rows, gated, down, gather_first)
        for rows, (gateds, downs) in CANDIDATES.items()
        for gather_first in ((False, True) if rows == 128 else (False,))
        for gated, down in zip(gateds, downs, strict=True)
    ]


def fill_cache(part: int, parts: int) -> None:
    """Compile this process's share of the kernels."""
    shape = Shape("small", E=16, K=8, H=512, F=256, fp8=True)
    weights = random_weights(shape)
    for tiles in all_tiles()[part::parts]:
        try:
            layer(tiles, shape, weights, Workspace(torch.device("cuda")), random_steps(shape, 64, 1)[0])
        except Exception as e:
            print(f"{tiles} does not compile: {str(e).splitlines()[0]}", file=sys.stderr)


def timed(
    shape: Shape, weights: ExpertWeights, steps: list[StandardRows], tried: list[GemmTiles], rounds: int
) -> Iterator[tuple[GemmTiles, float]]:
    graphs, by_name, held = {}, {}, []
    for tiles in tried:
        held.append(Workspace(torch.device("cuda")))  # its own: one that grew would move under an earlier graph
        try:
            graphs[str(tiles)] = captured([partial(layer, tiles, shape, weights, held[-1], step) for step in steps])
            by_name[str(tiles)] = tiles
        except Exception as e:
            print(f"{tiles} does not run: {str(e).splitlines()[0]}", file=sys.stderr)
    for name, timing in time_in_turns(graphs, calls=len(steps), rounds=rounds).items():
        yield by_name[name], timing.median_us


def measure(shape: Shape, weights: ExpertWeights, M: int, *, rounds: int) -> Iterator[dict[str, object]]:
    steps = random_steps(shape, M, steps_to_rotate(shape, M))
    problem = {"slots": M * shape.K, "num_experts": shape.E, "hidden": shape.H, "intermediate": shape.F}
    chosen = choose_tiles(**problem, itemsize=1)
    roof = roof_us(shape, steps)
    print(f"\n{shape.model} M={M} mean {M * shape.K / shape.E:.1f} roof {roof:.1f}")
    first = [chosen]
    for rows in heights(M * shape.K / shape.E):
        gateds, downs = CANDIDATES[rows]
        first += [GemmTiles(rows, gated, downs[0]) for gated in gateds]
    results = dict(timed(shape, weights, steps, list(dict.fromkeys(first)), rounds))
    second = []
    for rows in {tiles.block_rows for tiles in results}:
        best = min((t for t in results if t.block_rows == rows), key=results.__getitem__)
        second += [replace(best, down=down) for down in CANDIDATES[rows][1][1:]]
        if rows == 128:
            second.append(replace(best, gather_first=not best.gather_first))
    results |= dict(timed(shape, weights, steps, [chosen, *second], rounds))
    for tiles, us in sorted(results.items(), key=lambda item: item[1]):
        if us <= 1.15 * min(results.values()) or tiles == chosen:
            print(f"{us:9.1f} {roof / us:5.2f} {'*' if tiles == chosen else ' '} {_short(tiles)}")
        yield {
            "model": shape.model, "M": M, "roof_us": roof, "us": us, "chosen": tiles == chosen, **asdict(tiles)
        }  # fmt: skip


def _short(tiles: GemmTiles) -> str:
    """Columns x warps x stages, programs per multiprocessor, rows side by side."""
    gated, down = (
        f"{t.block_columns}c {t.num_warps}w {t.num_stages}s p{t.programs_per_sm} g{t.group_rows}"
        for t in (tiles.gated, tiles.down)
    )
    return f"rows {tiles.block_rows:3}{' gathered' if tiles.gather_first else ''}  gated {gated}  down {down}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=FP8_MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=150, help="no point is begun later than this")
    parser.add_argument("--compilers", type=int, default=8)
    parser.add_argument("--fill-cache", nargs=2, type=int, metavar=("PART", "PARTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fill_cache:
        fill_cache(*args.fill_cache)
        return
    began = monotonic()
    compilers = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.tune_fp8", "--fill-cache", str(i), str(args.compilers)])
        for i in range(args.compilers)
    ]
    for compiler in compilers:
        compiler.wait()
    print(f"compiled in {monotonic() - began:.0f} s")
    where = machine()
    for M in args.tokens:
        for model in args.models:
            if monotonic() - began > args.seconds:
                print(f"{model} M={M} is left out: out of time")
                continue
            shape = replace(SHAPES[model], fp8=True)
            for result in measure(shape, random_weights(shape), M, rounds=args.rounds):
                if args.out:
                    with args.out.open("a") as f:
                        f.write(json.dumps(result | where) + "\n")


if __name__ == "__main__":
    main()

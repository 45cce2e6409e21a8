"""Finding the fastest way to run a shape on so many rows: the search, and the measuring on a GPU that it asks for.

Letters: R rows, K top-k, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch

from vllm_moe_modular.bench import tile_candidates
from vllm_moe_modular.bench.accuracy import Judge
from vllm_moe_modular.bench.candidates import of_part
from vllm_moe_modular.bench.experts import in_a_line
from vllm_moe_modular.bench.problems import activation_of, random_steps, random_weights
from vllm_moe_modular.bench.shapes import Shape, steps_to_rotate
from vllm_moe_modular.bench.tile_candidates import Gpu
from vllm_moe_modular.bench.timing import captured, time_in_turns
from vllm_moe_modular.errors import MoEModularError, UnsupportedError
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.deep_gemm_library import load_deep_gemm
from vllm_moe_modular.experts.deep_gemm_requirements import MULTIPLE
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.gemm_tiles import GemmTiles
from vllm_moe_modular.kernels.launch import can_specialize, shared_memory_bytes
from vllm_moe_modular.kernels.tuned_tables import TunedCell, TunedShape, TunedTable
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.workspace import Workspace

GAIN = 0.99
"""Of the untuned time: what is not faster than that is noise, and the untuned tiles stay."""

NEAR = 1.15
"""Times the best of the first round: heights of blocks that are not within it are given up."""

SMALL_BATCH_ROWS = 4
DEEP_GEMM_FROM = 16
"""Mean rows of an expert."""


@dataclass(frozen=True)
class Way:
    """One way to run a layer: the grouped GEMMs with these tiles, or one of the other two."""

    tiles: GemmTiles | None = None
    name: str = "grouped_gemm"


SMALL_BATCH, DEEP_GEMM = Way(name="small_batch"), Way(name="deep_gemm")

Measure = Callable[[Sequence[Way]], Mapping[Way, float]]
"""Microseconds of each way, all timed in turns; ways that fail or are wrong are left out."""


class TuningError(MoEModularError, RuntimeError):
    """A cell cannot be tuned, or the table that it belongs in is of another GPU."""


def tune_cell(shape: Shape, rows: int, measure: Measure, *, deep_gemm: bool, gpu: Gpu) -> TunedCell:
    """Two rounds, first GEMM then second, and a third in which the best of both meet the other ways again.

    Times of different rounds are compared as multiples of that of the untuned tiles, which run in each.

    Args:
        deep_gemm: whether it is there and takes the shape.
        gpu: what it allows.

    Raises:
        TuningError: the untuned tiles do not run, or are wrong.
    """
    untuned = Way(tile_candidates.untuned(shape, rows, gpu))
    others = [SMALL_BATCH] if rows <= SMALL_BATCH_ROWS else []
    others += [DEEP_GEMM] if deep_gemm and rows * shape.K >= DEEP_GEMM_FROM * shape.E else []
    times: dict[Way, float] = {}

    def run(ways: Sequence[Way]) -> Mapping[Way, float]:
        us = measure(list(dict.fromkeys([untuned, *ways])))
        if untuned not in us:
            raise TuningError(f"{shape.model}, {rows} rows: the untuned tiles do not run here, or are wrong")
        times.update({way: t / us[untuned] for way, t in us.items()})
        return us

    first = tile_candidates.first_round(shape, rows, gpu)
    us = run([Way(tiles) for tiles in first])
    if len(first) > 1:
        run([Way(tiles) for tiles in tile_candidates.second_round(shape, _best_of_heights(times), gpu)])
    best = sorted((way for way in times if way.tiles), key=times.__getitem__)[:3]
    us = run([*best, *others])
    fastest = min((way for way in us if way.tiles), key=us.__getitem__)
    chosen = fastest if us[fastest] < GAIN * us[untuned] else untuned
    assert chosen.tiles is not None, "a grouped GEMM without tiles"
    return TunedCell(
        rows=rows,
        tiles=chosen.tiles,
        grouped_gemm_us=us[chosen],
        untuned_us=us[untuned],
        small_batch_us=us.get(SMALL_BATCH),
        deep_gemm_us=us.get(DEEP_GEMM),
    )


def _best_of_heights(times: Mapping[Way, float]) -> list[GemmTiles]:
    """The best tiles of each height of blocks that is near the best of all."""
    best: dict[int, Way] = {}
    for way in sorted((way for way in times if way.tiles), key=times.__getitem__):
        assert way.tiles is not None, "left out above"
        best.setdefault(way.tiles.block_rows, way)
    limit = NEAR * min(times[way] for way in best.values())
    return [way.tiles for way in best.values() if way.tiles is not None and times[way] <= limit]


TuneShape = Callable[[Shape, Sequence[int]], Iterator[TunedCell]]
"""The cells of one shape, in the order of the rows that were given."""


def missing_cells(work: Sequence[tuple[Shape, Sequence[int]]], table: TunedTable) -> list[tuple[Shape, list[int]]]:
    """What a table has not yet, of what was asked for."""
    found = []
    for shape, all_rows in work:
        done = {cell.rows for cell in table.shapes.get(key_of(shape), ())}
        if rows := [R for R in dict.fromkeys(all_rows) if R not in done]:
            found.append((shape, rows))
    return found


def key_of(shape: Shape) -> TunedShape:
    """Of the table."""
    return TunedShape(shape.weights, E=shape.E, K=shape.K, H=shape.H, F=shape.F)


class GpuTuner:
    """Draws weights of a shape once, and tunes cell after cell on the current GPU.

    Args:
        rounds: of replays in turns.
        compilers: processes that fill Triton's cache before anything is timed; 0: none.
        say: what is told of ways that fail and are wrong.
    """

    def __init__(self, *, rounds: int, compilers: int, say: Callable[[str], None]) -> None:
        self._rounds, self._compilers, self._say = rounds, compilers, say

    def __call__(self, shape: Shape, all_rows: Sequence[int]) -> Iterator[TunedCell]:
        """See `TuneShape`."""
        weights = random_weights(shape)
        gpu = gpu_for(shape, weights)
        if self._compilers:
            compile_ahead(shape, all_rows, gpu, self._compilers, self._say)
        has_deep_gemm = _takes_deep_gemm(shape, self._say)
        for rows in all_rows:
            measure = GpuMeasure(shape, weights, rows, rounds=self._rounds, say=self._say)
            yield tune_cell(shape, rows, measure, deep_gemm=has_deep_gemm, gpu=gpu)


class GpuMeasure:
    """A `Measure` of one cell: whole layers, checked against float64, in CUDA graphs."""

    def __init__(
        self, shape: Shape, weights: ExpertWeights, rows: int, *, rounds: int, say: Callable[[str], None]
    ) -> None:
        self._shape, self._weights, self._rounds, self._say = shape, weights, rounds, say
        self._steps = random_steps(shape, rows, steps_to_rotate(shape, rows))
        self._judge = Judge.of(shape, weights, self._steps[-1])
        self._where = f"{shape.model}, {rows} rows"

    def __call__(self, ways: Sequence[Way]) -> dict[Way, float]:
        parts = {way: part_of(way, self._shape) for way in ways}
        workspace = Workspace(self._weights.w2.device)  # of all: one that grew would move under an earlier graph
        for part in parts.values():
            workspace.reserve(sum(spec.nbytes for spec in part.workspace(self._steps[0], self._weights)))
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        names = {str(i): way for i, way in enumerate(ways)}
        for name, way in names.items():
            layer = of_part(parts[way], self._weights, workspace).layer
            try:
                if why := self._judge.objection(self._judge.error(layer(self._steps[-1]))):
                    self._say(f"{self._where}: {way} does not count: {why}")
                    continue
                graphs[name] = captured([partial(layer, step) for step in self._steps])
            except Exception as error:  # tiles that this GPU or this Triton does not take
                self._say(f"{self._where}: {way} does not run: {in_a_line(error)}")
        timings = time_in_turns(graphs, len(self._steps), self._rounds)
        return {names[name]: timing.median_us for name, timing in timings.items()}


def gpu_for(shape: Shape, weights: ExpertWeights) -> Gpu:
    """What the GPU that holds the weights allows."""
    specializes = can_specialize(weights.w13, weights.w2, interleaved=shape.interleaved_swiglu)
    return Gpu(shared_memory_bytes(weights.w2.device), specializes)


def part_of(way: Way, shape: Shape) -> PermuteExpertsUnpermute:
    """What runs a layer in this way and in no other."""
    activation = activation_of(shape)
    if way == DEEP_GEMM:
        return DeepGemmExperts(activation)
    return TritonExperts(activation, tiles=way.tiles, slot_by_slot=way == SMALL_BATCH)


def _takes_deep_gemm(shape: Shape, say: Callable[[str], None]) -> bool:
    """In fp8 only: see `prefers_deep_gemm`."""
    multiple = MULTIPLE[torch.float8_e4m3fn]
    if shape.interleaved_swiglu or not shape.fp8 or shape.H % multiple or shape.F % multiple:
        return False
    try:
        load_deep_gemm()
    except UnsupportedError as error:
        say(f"deep_gemm is not tried: {error}")
        return False
    return True


def compile_ahead(shape: Shape, all_rows: Sequence[int], gpu: Gpu, processes: int, say: Callable[[str], None]) -> None:
    """Compile, side by side, what tuning will run: that takes far longer than timing it."""
    tiles = tile_candidates.to_compile(shape, all_rows, gpu)
    few = replace(shape, E=max(2, shape.K))  # kernels are the same for any number of experts
    with ProcessPoolExecutor(min(processes, len(tiles)), mp_context=get_context("spawn")) as pool:
        shares = [tiles[i :: min(processes, len(tiles))] for i in range(min(processes, len(tiles)))]
        for done in as_completed([pool.submit(compile_share, few, share) for share in shares]):
            try:
                for line in done.result():
                    say(line)
            except Exception as error:  # a compiler that died; what it left is compiled when it is timed
                say(f"{shape.model}: compiling ahead failed: {in_a_line(error)}")


def compile_share(shape: Shape, share: Sequence[GemmTiles]) -> list[str]:
    """Run each once; returns what failed."""
    weights, failed = random_weights(shape), []
    (step,) = random_steps(shape, 64, 1)
    for tiles in share:
        try:
            of_part(part_of(Way(tiles), shape), weights).layer(step)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{shape.model}: {tiles} does not compile: {in_a_line(error)}")
    return failed

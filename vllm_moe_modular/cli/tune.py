"""`vllm-moe-modular tune`: makes a tuned table for the GPU of this machine, cell after cell; can be gone on with."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from vllm_moe_modular.bench.shapes import BF16, FP8, SHAPES, Shape
from vllm_moe_modular.cli.explain import read_config
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.selection.from_config import problems_from_config

if TYPE_CHECKING:
    from vllm_moe_modular.bench.tuning import TuneShape
    from vllm_moe_modular.kernels.tuned_tables import TunedTable

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROUNDS, COMPILERS = 11, 8
MOST_ROWS = 1 << 24
"""As in a tuned table."""

DTYPES = {"bfloat16": BF16, "float16": "float16", "fp8": FP8}
SCHEMES = {"none": None, "fp8 128x128": FP8}
"""Of a checkpoint's weights, what the table calls them; None: the dtype of the rows."""


DRY_RUN_LEGEND = """\
A cell is a shape (E experts, K top-k, H hidden, F intermediate size) and a number of rows. Of each: how many tiles its
first round compares; a second goes on from the fastest. Untuned is what runs without a table: the rows of a block, and
its columns in the first and in the second GEMM."""


class Bar(Protocol):
    """What is used of a progress bar."""

    def update(self, n: int) -> Any: ...
    def set_description(self, text: str) -> Any: ...
    def close(self) -> Any: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be tuned."""
    parser.add_argument(
        "--shape", nargs="+", default=[], metavar="E,K,H,F", help="experts, top-k, hidden, intermediate size"
    )
    parser.add_argument(
        "--model", nargs="+", default=[], metavar="MODEL",
        help=f"folder of a model, or a config.json; or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share its experts (default 1)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each of them (default 1)")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help=f"of the weights: {', '.join(DTYPES)} (default the config's, else bfloat16)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=list(ROWS),
        metavar="R",
        help=f"powers of two (default {' '.join(map(str, ROWS))})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="table to make, or its folder; what it has already is kept"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"replays of each (default {ROUNDS})")
    parser.add_argument("--seconds", type=float, metavar="S", help="no cell is begun later than this")
    parser.add_argument(
        "--compilers", type=int, default=COMPILERS, metavar="N",
        help=f"processes that compile ahead, 0 for none (default {COMPILERS})",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="measure nothing; say what would be tried; needs no GPU")


def run(options: argparse.Namespace) -> int:
    """Tunes what the table lacks. 1 if time ran out before all of it was done."""
    shapes = shapes_of(options)
    if any(R < 1 for R in options.rows) or options.rounds < 1 or options.compilers < 0:
        raise MoEModularError("--rows and --rounds take whole numbers, 1 or more, --compilers 0 or more")
    for R in options.rows:
        if R.bit_count() != 1 or R > MOST_ROWS:
            raise MoEModularError(
                f"--rows {R}: takes powers of two, {MOST_ROWS} at most, since workspaces are reserved for those; a "
                "cell holds for the numbers of rows between too"
            )
    if options.seconds is not None and not 0 < options.seconds < inf:
        raise MoEModularError(f"--seconds {options.seconds:g}: takes a number of seconds, more than 0")
    if options.dry_run:
        return dry_run(shapes, options.rows)
    if options.out is None:
        raise MoEModularError("--out names the table to make; give it, or --dry-run")
    from vllm_moe_modular.bench.timing import machine, require_cuda
    from vllm_moe_modular.bench.tuning import GpuTuner

    require_cuda("tune")
    where = machine()
    gpu = where.pop("device")
    file = table_file(options.out, gpu)
    table = table_to_fill(file, gpu, where)
    tuner = GpuTuner(rounds=options.rounds, compilers=options.compilers, say=say)
    return fill(table, file, [(shape, options.rows) for shape in shapes], tuner, seconds=options.seconds)


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Everything that was named, each shape once.

    Raises:
        MoEModularError: nothing was named; a shape is none, a model is not known or not tunable.
    """
    if options.dtype is not None and options.dtype not in DTYPES:
        raise MoEModularError(f"--dtype {options.dtype} is not known; known: {', '.join(DTYPES)}")
    for name, value in (("--ep", options.ep), ("--tp", options.tp)):
        if value < 1:
            raise MoEModularError(f"{name} {value}: takes a whole number, 1 or more")
    own = [f"--shape {t[:80]}" for t in options.shape] + [f"--model {m}" for m in options.model if m in SHAPES]
    if own and (options.ep > 1 or options.tp > 1):
        raise MoEModularError(
            f"--ep and --tp share out a model that is read from a config.json; {own[0]} is one rank's share already: "
            "name what one rank has with --shape, or leave --ep and --tp out"
        )
    weights = DTYPES[options.dtype or "bfloat16"]
    found = [_from_text(text, weights) for text in options.shape]
    for model in options.model:
        if model in SHAPES:
            found.append(replace(SHAPES[model], weights=weights))
        else:
            found += _from_config(Path(model), options)
    if not found:
        raise MoEModularError("name what to tune: --shape 128,8,2048,768, or --model with a config.json or a name")
    for shape in found:
        if shape.K > shape.E:
            raise MoEModularError(
                f"{shape.model}: top-k is {shape.K}, and there are {shape.E} experts on a rank; name more experts, or "
                "a smaller --ep"
            )
        if shape.fp8 and (shape.interleaved_swiglu or shape.F % 128):
            raise MoEModularError(
                f"{shape.model} in fp8: the triton experts take an intermediate size that is a multiple of 128, "
                "gates and ups not interleaved; leave it out, or name another --dtype"
            )
    return list({replace(shape, model=""): shape for shape in reversed(found)}.values())[::-1]


def _from_text(text: str, weights: str) -> Shape:
    numbers = text.split(",")
    good = all(n.isascii() and n.isdecimal() and len(n) <= 7 and int(n) for n in numbers)
    if len(numbers) != 4 or not good:
        raise MoEModularError(
            f"--shape {text[:80]}: takes E,K,H,F, each of 7 digits at most, for instance 128,8,2048,768"
        )
    E, K, H, F = map(int, numbers)
    return Shape(text, E=E, K=K, H=H, F=F, weights=weights)


def _from_config(model: Path, options: argparse.Namespace) -> list[Shape]:
    if options.ep > 1 and options.tp > 1:
        raise MoEModularError("--ep and --tp: a server shares the experts in one of the two ways; give one")
    layers = problems_from_config(read_config(model), tp=options.tp, dp=options.ep, ep=options.ep > 1)
    found = []
    for problem, _, which in layers:
        if problem.quant_scheme not in SCHEMES and options.dtype is None:
            raise MoEModularError(
                f"{model}, layers {which}: the triton experts are tuned for weights that are not quantised or in fp8 "
                f"of 128x128, not for {problem.quant_scheme}; name a --dtype"
            )
        weights = DTYPES[options.dtype] if options.dtype else SCHEMES[problem.quant_scheme] or problem.dtype
        if weights not in DTYPES.values():
            raise MoEModularError(f"{model}, layers {which}: {weights} is not tuned; name a --dtype")
        found.append(
            Shape(
                model.parent.name if model.name == "config.json" else model.stem,
                E=problem.num_local_experts, K=problem.top_k, H=problem.hidden, F=problem.intermediate,
                interleaved_swiglu=problem.activation == "swigluoai", weights=weights,
            )
        )  # fmt: skip
    return found


def table_file(out: Path, gpu: str) -> Path:
    """The table that --out names, itself or by its folder.

    Raises:
        MoEModularError: there can be no such file.
    """
    from vllm_moe_modular.kernels.tuned_tables import file_name

    try:
        return out / file_name(gpu) if out.is_dir() else out
    except OSError as error:
        raise MoEModularError(f"--out {out} cannot be looked for: {error.strerror}; name another file") from error


def table_to_fill(file: Path, gpu: str, made_with: dict[str, str]) -> "TunedTable":
    """The table of an earlier run, or an empty one.

    Raises:
        TunedTableError: the file is malformed, or cannot be written.
        TuningError: it is of another GPU, or its folder is not there.
    """
    from vllm_moe_modular.bench.tuning import TuningError
    from vllm_moe_modular.kernels.tuned_tables import TunedTable, read_table, require_writable

    if not file.absolute().parent.is_dir():
        raise TuningError(f"--out {file}: its folder does not exist; make it first")
    require_writable(file)
    if not file.exists():
        return TunedTable(gpu, {}, made_with)
    table = read_table(file)
    if table.gpu != gpu:
        raise TuningError(f"--out {file} is the table of {table.gpu}, and this is {gpu}; name another file")
    return TunedTable(gpu, table.shapes, made_with)


def fill(
    table: "TunedTable",
    file: Path,
    work: Sequence[tuple[Shape, Sequence[int]]],
    tuner: "TuneShape",
    *,
    progress: Callable[[int], Bar] | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = monotonic,
) -> int:
    """Tunes what `table` lacks and saves after every cell; returns the exit status."""
    from vllm_moe_modular.bench.tuning import key_of, missing_cells
    from vllm_moe_modular.kernels.tuned_tables import write_table

    began, left, took = clock(), 0, list[str]()
    missing = missing_cells(work, table)
    asked = sum(len(set(rows)) for _, rows in work)
    count = sum(len(rows) for _, rows in missing)
    bar = (progress or progress_bar)(count)
    for shape, all_rows in missing:
        since, done = clock(), 0
        if seconds is None or since - began <= seconds:
            bar.set_description(f"{shape.model} {shape.weights}")
            for cell in tuner(shape, all_rows):
                table = table.with_cell(key_of(shape), cell)
                write_table(file, table)
                bar.update(1)
                done += 1
                if seconds is not None and clock() - began > seconds:
                    break
            took.append(f"{shape.model} {shape.weights}: {done} cells, {clock() - since:.0f} s")
        left += len(all_rows) - done
    bar.close()
    print("\n".join([*took, f"{file}: {count - left} cells tuned, {asked - count} were there already"]))
    if left:
        print(f"{left} cells are left: time ran out; the same command goes on with them")
    return 1 if left else 0


def dry_run(shapes: Iterable[Shape], all_rows: Sequence[int]) -> int:
    """Says how many ways each cell would try at least, and what runs without a table."""
    from vllm_moe_modular.bench import tile_candidates

    print(DRY_RUN_LEGEND)
    for shape in shapes:
        print(f"{shape.model} {shape.weights}: E {shape.E}, K {shape.K}, H {shape.H}, F {shape.F}")
        for rows in all_rows:
            first = tile_candidates.first_round(shape, rows)
            tiles = tile_candidates.untuned(shape, rows)
            gathers = ", rows gathered first" if tiles.gather_first else ""
            print(
                f"  {rows:6} rows: {len(first):2} in the first round; untuned: blocks of {tiles.block_rows} rows, "
                f"columns {tiles.gated.block_columns} and {tiles.down.block_columns}{gathers}"
            )
    return 0


def progress_bar(total: int) -> Bar:
    """On stderr. tqdm's, which vLLM brings; without it each shape is a line."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    bar: Bar = tqdm(total=total, unit="cell", file=sys.stderr)
    return bar


def say(line: str) -> None:
    """On stderr, without breaking the bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(line, file=sys.stderr)
    else:
        tqdm.write(line, file=sys.stderr)


class _NoBar:
    def update(self, n: int) -> None:
        """Nothing to see."""

    def set_description(self, text: str) -> None:
        print(text, file=sys.stderr)

    def close(self) -> None:
        """Nothing to close."""

"""`vllm-moe-modular bench experts`: measures, keeps JSON lines, prints the report, draws the picture."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from types import ModuleType

from vllm_moe_modular.bench.report import BenchFileError, Result, read_results, report, require_appendable
from vllm_moe_modular.bench.shapes import FP8, FP8_MODELS, SHAPES, TOKENS, Shape
from vllm_moe_modular.cli.bench import ROUNDS, SEEDS
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.settings import from_environment

OF_MEASURING = {
    "out": None, "models": None, "tokens": list(TOKENS), "candidates": None, "fp8": False, "rounds": ROUNDS,
    "seconds": None, "tuned": None, "accuracy": False, "seeds": SEEDS,
}  # fmt: skip
"""Options that --read has no use for, with their defaults."""


def run(options: argparse.Namespace) -> int:
    """1 only where --accuracy finds a result that is too far off."""
    if options.read:
        if given := [f"--{name}" for name, default in OF_MEASURING.items() if getattr(options, name) != default]:
            raise MoEModularError(f"--read measures nothing, so {', '.join(given)} would do nothing; leave one out")
        if options.plot:
            figures().require_format(options.plot)
        return _tell(read_results(options.read), options.plot)
    shapes = chosen_shapes(options.models, fp8=options.fp8)
    for name, value in (("--tokens", min(options.tokens)), ("--rounds", options.rounds), ("--seeds", options.seeds)):
        if value < 1:
            raise MoEModularError(f"{name} takes whole numbers, 1 or more, not {value}")
    if options.seconds is not None and not 0 < options.seconds < inf:
        raise MoEModularError(f"--seconds {options.seconds:g}: takes a number of seconds, more than 0")
    if options.out:
        require_appendable(options.out)
    if options.plot:
        figures().require_format(options.plot)  # before minutes are spent on what cannot be drawn
    from vllm_moe_modular.bench.timing import require_cuda

    require_cuda("bench experts")
    return _accuracy(shapes, options) if options.accuracy else _measure(shapes, options)


def chosen_shapes(models: Sequence[str] | None, *, fp8: bool) -> list[Shape]:
    """The shapes of these models; None: of all that run with such weights.

    Raises:
        MoEModularError: a model is not known, or has no fp8 weights here.
    """
    for name in models or ():
        if name not in SHAPES:
            raise MoEModularError(f"--models {name} is not known; known: {', '.join(SHAPES)}")
        if fp8 and SHAPES[name].interleaved_swiglu:
            raise MoEModularError(f"--models {name} with --fp8: its gates and ups share blocks; leave it out")
    chosen = [SHAPES[name] for name in models or (FP8_MODELS if fp8 else SHAPES)]
    return [replace(shape, weights=FP8) for shape in chosen] if fp8 else chosen


def _measure(shapes: Sequence[Shape], options: argparse.Namespace) -> int:
    import torch

    from vllm_moe_modular.bench.candidates import CANDIDATES
    from vllm_moe_modular.bench.experts import measure_shape
    from vllm_moe_modular.bench.timing import machine
    from vllm_moe_modular.kernels.tuned_tables import tuned_table

    names = options.candidates or list(CANDIDATES)
    if unknown := [name for name in names if name not in CANDIDATES]:
        raise MoEModularError(f"--candidates {', '.join(unknown)}: known: {', '.join(CANDIDATES)}")
    tuned = tuned_table(torch.device("cuda"), _tuned_folder(options))
    where, began, results = machine(), monotonic(), list[Result]()
    for shape in shapes:
        if options.seconds is not None and monotonic() - began > options.seconds:
            print(f"{shape.model} is left out: {options.seconds:g} s are over", file=sys.stderr)
            continue
        since = monotonic()
        for result in measure_shape(shape, options.tokens, names, tuned, rounds=options.rounds):
            results.append(result)
            if options.out:
                append(options.out, result | where)
        torch.cuda.empty_cache()
        print(f"{shape.model} {shape.weights}: {monotonic() - since:.0f} s", file=sys.stderr)
    return _tell(results, options.plot)


def _accuracy(shapes: Sequence[Shape], options: argparse.Namespace) -> int:
    import torch

    from vllm_moe_modular.bench.accuracy import SLACK
    from vllm_moe_modular.bench.accuracy_sweep import Worst, sweep
    from vllm_moe_modular.bench.candidates import ours
    from vllm_moe_modular.kernels.tuned_tables import tuned_table

    tuned, worst = tuned_table(torch.device("cuda"), _tuned_folder(options)), list[Worst]()
    for shape in shapes:
        for found in sweep(shape, partial(ours, shape, tuned), seeds=options.seeds):
            worst.append(found)
            told = "" if found.good else f"   more than {SLACK:g}"
            print(f"{found.model:18}{shape.weights:13}{found.M:6} {found.experts:10}{found.ratio:7.3f}{told}")
    bad = sum(not found.good for found in worst)
    print(
        f"errors as multiples of plain torch's, the worst of {options.seeds} seeds; {bad} of {len(worst)} too far off"
    )
    return 1 if bad or not worst else 0


def _tuned_folder(options: argparse.Namespace) -> str | None:
    """What a server that is started here would read, unless one was named."""
    folder: str | None = options.tuned or from_environment(os.environ).tuned
    return folder


def append(file: Path, result: Result) -> None:
    """One JSON line.

    Raises:
        BenchFileError: the file cannot be written.
    """
    try:
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(result) + "\n")
    except OSError as error:
        raise BenchFileError(f"{file} cannot be written: {error.strerror}") from error


def _tell(results: Sequence[Result], plot: Path | None) -> int:
    print(report(results))
    if plot is not None:
        figures().experts_plot(results, plot)
        print(f"\n{plot}")
    return 0


def figures() -> ModuleType:
    """What draws.

    Raises:
        BenchFileError: there is no matplotlib.
    """
    try:
        from vllm_moe_modular.cli import bench_figures
    except ImportError as error:
        why = " ".join(str(error).split())
        raise BenchFileError(f"matplotlib draws --plot ({why}); pip install 'vllm-moe-modular[trace]'") from error
    return bench_figures

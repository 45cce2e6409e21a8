"""What `bench experts` says about its results: a table, ratios by region, memory, what was not run.

Standard library only: an earlier run can be read where there is no torch.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from vllm_moe_modular.errors import MoEModularError

Result = Mapping[str, Any]

REGIONS = {"1": (1, 1), "8-128": (8, 128), "512": (512, 512), "2048-16384": (2048, 16384)}
"""By the number of tokens."""

OURS = ("triton", "deep_gemm")
PEERS = ("vllm", "vllm_deep_gemm")
ORDER = (*OURS, *PEERS, "matmul_ogs", "torch", "gemms")

LEGEND = (
    "M: tokens of a call; roof: what memory or the matrix units of an H200 take at least; ours: what the experts",
    "triton_or_deep_gemm run there; eff: roof / ours; / vllm: ours / vllm, its Triton kernel; vllm_deep_gemm: its",
    "DeepGEMM experts, for fp8 in blocks; gemms: DeepGEMM's two GEMMs and no more",
)

MANY = 8192
"""Tokens from which a layer is compared with GEMMs alone."""

SLOWER = 1.02
"""Times vLLM's kernel: what is slower than that is named."""


class BenchFileError(MoEModularError, ValueError):
    """A file of results cannot be read or written, or holds none."""


def read_results(files: Iterable[Path]) -> list[Result]:
    """JSON lines of earlier runs; of the same candidate at the same point the last one counts.

    Raises:
        BenchFileError: a file is missing, or a line is no result.
    """
    return read_lines(files, _check, key=("experts", "model", "weights", "M"), of="bench experts")


def read_lines(files: Iterable[Path], check: Callable[[Any], None], *, key: Sequence[str], of: str) -> list[Result]:
    """JSON lines of a benchmark; of those that agree in `key` the last one counts.

    Args:
        check: raises ValueError, KeyError or TypeError for what is no result.
        of: the benchmark, for messages.

    Raises:
        BenchFileError: a file is missing, or a line is no result.
    """
    found: dict[tuple[Any, ...], Result] = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise BenchFileError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                check(result)
                point = tuple(result[name] for name in key)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise BenchFileError(
                    f"{file}, line {number}, is no result of {of} ({type(error).__name__}: {error}); take "
                    "the line out, or measure again"
                ) from error
            found[point] = result
    if not found:
        raise BenchFileError("there are no results: " + ", ".join(map(str, files)))
    return list(found.values())


def _check(result: Any) -> None:
    """Raises:
    ValueError, KeyError: a line is not what the report below takes; names the key.
    """
    if not isinstance(result, dict):
        raise ValueError("takes an object")
    for name in ("experts", "model", "weights", *(n for n in ("note", "not_run") if n in result)):
        if not isinstance(result[name], str):
            raise ValueError(f"{name} takes text")
    if type(result["M"]) is not int or not 1 <= result["M"] < 1 << 31:
        raise ValueError("M takes a whole number, 1 or more")
    for name in ("median_us", "roof_us", "eff"):
        needed = name in result or "not_run" not in result
        if needed and (type(result[name]) not in (int, float) or not 1e-9 < result[name] < 1e15):
            raise ValueError(f"{name} takes a number, more than 0")
    if "median_us" in result and not {"roof_us", "eff"} <= result.keys():
        raise ValueError("median_us takes roof_us and eff beside it")
    size = result.get("workspace_bytes")
    if size is not None and (type(size) not in (int, float) or not 0 <= size < 1e18):
        raise ValueError("workspace_bytes takes a number, 0 or more")


def require_appendable(file: Path) -> None:
    """Before minutes are spent on what cannot be kept.

    Raises:
        BenchFileError: the file cannot be written.
    """
    try:
        was_there = file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if not was_there:
            file.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BenchFileError(
            f"--out {file} cannot be written: {why}; make its folder, or name a file in one that can be written"
        ) from error


def points(results: Iterable[Result]) -> dict[tuple[str, str, int], dict[str, Result]]:
    """Those that were timed, by model, weights and tokens, then by candidate."""
    by_point: dict[tuple[str, str, int], dict[str, Result]] = {}
    for r in results:
        if "median_us" in r:
            by_point.setdefault((r["model"], r["weights"], r["M"]), {})[r["experts"]] = r
    return by_point


def ours(point: Mapping[str, Result]) -> Result | None:
    """What `triton_or_deep_gemm` runs there."""
    return next((point[n] for n in OURS if n in point and point[n].get("chosen")), point.get("triton"))


def report(results: Sequence[Result]) -> str:
    """Everything, for a screen."""
    by_point = points(results)
    sections = [
        table(by_point),
        ratios(by_point),
        over_gemms(by_point),
        memory(by_point),
        told_of(results, "note"),
        told_of(results, "not_run"),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def table(by_point: Mapping[tuple[str, str, int], Mapping[str, Result]]) -> Iterator[str]:
    """Median microseconds; `ours` is the one of our two that the part runs, `eff` is roof over ours."""
    names = [name for name in ORDER if any(name in point for point in by_point.values())]
    head = f"{'model':18}{'weights':13}{'M':>6}{'roof':>10}{'ours':>10}{'eff':>6}{'/ vllm':>8}"
    yield head + "".join(f"{name:>15}" for name in names) + "   us per layer"
    for (model, weights, M), point in by_point.items():
        mine = ours(point)
        cells = f"{model:18}{weights:13}{M:6}"
        if mine is None:
            cells += f"{next(iter(point.values()))['roof_us']:10.1f}{'-':>10}{'-':>6}{'-':>8}"
        else:
            ratio = f"{mine['median_us'] / point['vllm']['median_us']:.3f}" if "vllm" in point else "-"
            cells += f"{mine['roof_us']:10.1f}{mine['median_us']:10.1f}{mine['eff']:6.2f}{ratio:>8}"
        yield cells + "".join(f"{point[n]['median_us']:15.1f}" if n in point else f"{'-':>15}" for n in names)
    yield from LEGEND


def ratios(by_point: Mapping[tuple[str, str, int], Mapping[str, Result]]) -> Iterator[str]:
    """Ours over each kernel of vLLM's, region by region, for each kind of weights; then every cell that is too slow."""
    slow = []
    for peer in PEERS:
        of_weights: dict[str, dict[tuple[str, int], float]] = {}
        best: dict[str, dict[tuple[str, int], float]] = {}
        for (model, weights, M), point in by_point.items():
            mine = ours(point)
            if mine is not None and peer in point:
                theirs = point[peer]["median_us"]
                of_weights.setdefault(weights, {})[model, M] = mine["median_us"] / theirs
                least = min(point[name]["median_us"] for name in OURS if name in point)
                best.setdefault(weights, {})[model, M] = least / theirs
        for what, of_kind in (("ours", of_weights), ("the better of triton and deep_gemm", best)):
            for weights, cells in of_kind.items():
                for region, (low, high) in REGIONS.items():
                    if inside := {cell: ratio for cell, ratio in cells.items() if low <= cell[1] <= high}:
                        worst = max(inside, key=inside.__getitem__)
                        yield (
                            f"{weights}, M {region}: {what} / {peer} {geometric_mean(inside.values()):.3f} in the "
                            f"mean, worst {inside[worst]:.3f} ({worst[0]}, {worst[1]})"
                        )
        slow += [
            f"{model} {weights} M={M} {ratio:.3f} of {peer}"
            for weights, cells in of_weights.items()
            for (model, M), ratio in cells.items()
            if ratio > SLOWER
        ]
    if slow:
        yield f"slower than {SLOWER}: {', '.join(slow)}"


def over_gemms(by_point: Mapping[tuple[str, str, int], Mapping[str, Result]]) -> Iterator[str]:
    """Our whole layer over the two GEMMs alone, for many tokens."""
    for (model, weights, M), point in by_point.items():
        mine = ours(point)
        if mine is not None and "gemms" in point and M >= MANY:
            yield f"{model} {weights} M={M}: ours / gemms alone {mine['median_us'] / point['gemms']['median_us']:.3f}"


def memory(by_point: Mapping[tuple[str, str, int], Mapping[str, Result]]) -> Iterator[str]:
    """Scratch memory of a call of the most tokens, by shape; then every point where ours takes more than vLLM's.

    That is vLLM's kernel of the same kind. The result is left out for vLLM's and other peers, and included for ours
    where it lies there.
    """
    largest: dict[tuple[str, str], str] = {}
    more = []
    for (model, weights, M), point in sorted(by_point.items(), key=lambda item: item[0][2]):
        mib = {n: r["workspace_bytes"] / 2**20 for n, r in point.items() if r.get("workspace_bytes") is not None}
        mine = ours(point)
        if mine is None or mine["experts"] not in mib:
            continue
        peer = "vllm_deep_gemm" if mine["experts"] == "deep_gemm" and mib.get("vllm_deep_gemm") else "vllm"
        if not mib.get(peer):
            continue
        share = mib[mine["experts"]] / mib[peer]
        told = ", ".join(f"{name} {size:.1f}" for name, size in mib.items())
        largest[model, weights] = f"workspace, MiB, {model} {weights} M={M}: {told}; ours / {peer} {share:.2f}"
        if share > 1:
            more.append(f"{model} {weights} M={M} {share:.2f}")
    yield from largest.values()
    if more:
        yield f"workspace larger than vllm's: {', '.join(more)}"


def told_of(results: Iterable[Result], kind: str) -> Iterator[str]:
    """Notes, or reasons why something was not run: each once, with the points it holds for."""
    where: dict[tuple[str, str, str, str], list[int]] = {}
    for r in results:
        if kind in r:
            where.setdefault((r["experts"], r["model"], r["weights"], r[kind]), []).append(r["M"])
    for (experts, model, weights, what), tokens in where.items():
        yield f"{kind.replace('_', ' ')}: {experts}, {model} {weights}, M {', '.join(map(str, tokens))}: {what}"


def geometric_mean(numbers: Iterable[float]) -> float:
    """Of at least one."""
    logs = [log(n) for n in numbers]
    return exp(sum(logs) / len(logs))

"""What `bench all-to-all` says about its results: tables, the link, ratios to the libraries, what was not run.

No torch: an earlier run can be read where there is none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_moe_modular.bench.all_to_all_cases import LIBRARY_OF, LINK
from vllm_moe_modular.bench.report import Result, read_lines

Table = tuple[int, int, str, str]
"""Ranks, H, rows, mode: what the cells of one table have in common."""

PHASES = {"median_us": "round trip", "dispatch_us": "dispatch alone", "combine_us": "combine alone"}

_BYTES = "bytes_each_way"
_OPTIONAL = ("dispatch_us", "combine_us", _BYTES)

TARGETS = {128: 1.03, 4096: 1.02}
"""By T, the most that a round trip through our part may take of one through the library called directly."""

SHARED = "THE TIMES BELOW MEAN NOTHING: ranks shared a GPU, where kernels that wait for each other take turns"

LEGEND = (
    "us: microseconds of a call, the median of the slowest rank; T: tokens of each rank; rows: what a dispatch sends",
    "class: what really ran; combine takes: expert rows, one of each of a token's experts, which combine weights and",
    "adds up, or reduced rows, which the experts of a rank added up before; experts take no time here",
    "eager: as a host issues the calls, its own time included; graphs: replayed from a CUDA graph",
    "dispatch alone, combine alone: the same eager calls with an event between the two; they include waiting for peers",
    f"{LINK}: plain copies of the rows that have to cross, all ranks sending at once; eff: {LINK} / the peer's time",
    "names with a dot, and pplx_kernels: the library called directly; nccl: all-gather and reduce-scatter by hand",
)


def read_results(files: Iterable[Path]) -> list[Result]:
    """JSON lines of earlier runs; of the same peer in the same case and mode the last one counts.

    Raises:
        BenchFileError: a file is missing, or a line is no result.
    """
    return read_lines(files, _check, key=("peer", "rows", "mode", "ranks", "H", "T"), of="bench all-to-all")


def _check(result: Any) -> None:
    """Raises:
    ValueError, KeyError: a line is not what the report below takes; names the key.
    """
    if not isinstance(result, dict):
        raise ValueError("takes an object")
    texts, numbers = ["ran", "combine_takes"], ["median_us", *(name for name in _OPTIONAL if name in result)]
    if "not_run" in result:
        texts, numbers = ["not_run"], []
    for name in ("peer", "rows", "mode", *texts):
        if not isinstance(result[name], str):
            raise ValueError(f"{name} takes text")
    for name in ("ranks", "H", "T"):
        if type(result[name]) is not int or not 1 <= result[name] < 1 << 31:
            raise ValueError(f"{name} takes a whole number, 1 or more")
    for name in numbers:
        least = 0 if name == _BYTES else 1e-9  # one token may have no expert elsewhere
        if type(result[name]) not in (int, float) or not least <= result[name] < 1e15:
            raise ValueError(f"{name} takes a number, more than 0")


def timed(results: Iterable[Result]) -> dict[Table, dict[str, dict[int, Result]]]:
    """Those that were, by table, peer and T."""
    tables: dict[Table, dict[str, dict[int, Result]]] = {}
    for r in results:
        if "not_run" not in r:
            table = tables.setdefault((r["ranks"], r["H"], r["rows"], r["mode"]), {})
            table.setdefault(r["peer"], {})[r["T"]] = r
    return tables


def report(results: Sequence[Result]) -> str:
    """Everything, for a screen."""
    by_table = timed(results)
    sections: list[Iterable[str]] = [[SHARED]] if any(r.get("shared_gpu") for r in results) else []
    for table, peers in by_table.items():
        sections += [_cells(table, peers, phase) for phase in PHASES]
    sections += [LEGEND if by_table else (), links(by_table), ratios(by_table), not_run(results)]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _said(table: Table) -> str:
    ranks, H, rows, mode = table
    return f"hidden {H}, {rows} rows, {mode}, {ranks} ranks"


def _cells(table: Table, peers: Mapping[str, Mapping[int, Result]], phase: str) -> Iterator[str]:
    """Peers down, T across; below each peer the fraction of what the link does."""
    cells = {
        peer: {T: r[phase] for T, r in sorted(of_T.items()) if phase in r}
        for peer, of_T in peers.items()
        if any(phase in r for r in of_T.values())
    }
    if not cells:
        return
    sizes = sorted({T for of_T in cells.values() for T in of_T})
    said = {peer: next(iter(peers[peer].values())) for peer in cells}
    wide = [max(map(len, column)) + 2 for column in (
        ["peer", *cells], ["class", *(r["ran"] for r in said.values())],
        ["combine takes", *(r["combine_takes"] for r in said.values())],
    )]  # fmt: skip
    yield f"{_said(table)}: {PHASES[phase]}, us"
    yield _line(("peer", "class", "combine takes"), wide, [f"T {T}" for T in sizes])
    floor = cells.get(LINK, {})
    for peer, us in cells.items():
        names = (peer, said[peer]["ran"], said[peer]["combine_takes"])
        yield _line(names, wide, [f"{us[T]:.1f}" if T in us else "-" for T in sizes])
        if floor and peer != LINK:
            shares = [f"{floor[T] / us[T]:.2f}" if T in us and T in floor else "-" for T in sizes]
            yield _line(("  eff", "", ""), wide, shares)


def _line(names: Sequence[str], wide: Sequence[int], cells: Sequence[str]) -> str:
    return "".join(f"{name:{w}}" for name, w in zip(names, wide, strict=True)) + "".join(f"{c:>9}" for c in cells)


def links(by_table: Mapping[Table, Mapping[str, Mapping[int, Result]]]) -> Iterator[str]:
    """What a rank sent to the others while all did, at the largest T, where latency no longer counts."""
    for table, peers in by_table.items():
        if of_T := {T: r for T, r in peers.get(LINK, {}).items() if r.get(_BYTES)}:
            T = max(of_T)
            gb_s = of_T[T][_BYTES] / of_T[T]["median_us"] / 1e3
            yield f"{LINK}, {_said(table)}, T {T}: {gb_s:.0f} GB/s out of each rank, all ranks sending at once"


def ratios(by_table: Mapping[Table, Mapping[str, Mapping[int, Result]]]) -> Iterator[str]:
    """Round trips through each part over those of its library called directly; then what is above its target."""
    above = []
    for table, peers in by_table.items():
        for part, library in LIBRARY_OF.items():
            ours, theirs = peers.get(part, {}), peers.get(library, {})
            by_T = {T: ours[T]["median_us"] / theirs[T]["median_us"] for T in sorted(ours.keys() & theirs.keys())}
            if by_T:
                told = ", ".join(f"{ratio:.3f} at T {T}" for T, ratio in by_T.items())
                yield f"{part} / {library}, {_said(table)}: {told}"
            above += [
                f"{part}, {_said(table)}, T {T}: {ratio:.3f}, more than {TARGETS[T]:g}"
                for T, ratio in by_T.items()
                if T in TARGETS and ratio > TARGETS[T]
            ]
    yield from (f"above the target: {what}" for what in above)


def not_run(results: Sequence[Result]) -> Iterator[str]:
    """Each peer and reason once, with the cases that it holds for where these are not all."""
    for peer in dict.fromkeys(r["peer"] for r in results):
        of_peer = [r for r in results if r["peer"] == peer]
        for why in dict.fromkeys(r["not_run"] for r in of_peer if "not_run" in r):
            holds = [r for r in of_peer if r.get("not_run") == why]
            if len(holds) == len(of_peer):
                yield f"not run: {peer}: {why}"
                continue
            where: dict[tuple[str, str, int], list[int]] = {}
            for r in holds:
                where.setdefault((r["rows"], r["mode"], r["H"]), []).append(r["T"])
            told = "; ".join(
                f"{rows} rows, {mode}, hidden {H}, T {', '.join(map(str, sizes))}"
                for (rows, mode, H), sizes in where.items()
            )
            yield f"not run: {peer}: {why} ({told})"

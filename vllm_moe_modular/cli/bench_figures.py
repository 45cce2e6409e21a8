"""The pictures of `bench experts`, how near every candidate comes to the roof, and of `bench all-to-all`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from vllm_moe_modular.bench.all_to_all_cases import LIBRARY_OF, LINK, NCCL
from vllm_moe_modular.bench.all_to_all_report import timed
from vllm_moe_modular.bench.report import ORDER, BenchFileError, Result, points

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "grid.color": "#e3e7eb",
    "svg.hashsalt": "experts",
}
_COLOURS = dict(zip(ORDER, ("#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#e69f00", "#999999", "#000000"), strict=True))
"""Of Okabe and Ito, which colour-blind people tell apart: blues are ours, the rest is not."""

_PART_COLOURS = {
    "nvlink": "#0072b2", "allgather": "#56b4e9", "torch": "#009e73",
    "deepep_high_throughput": "#d55e00", "deepep_low_latency": "#e69f00", "pplx": "#cc79a7",
}  # fmt: skip
_PEER_LOOKS = {
    **{part: (colour, "-") for part, colour in _PART_COLOURS.items()},
    **{library: (_PART_COLOURS[part], "--") for part, library in LIBRARY_OF.items()},
    NCCL: ("#56b4e9", "--"),
    LINK: ("#000000", "-."),
}
"""A library called directly has the colour of its part, dashed."""

_ACROSS = 3
_CELL_IN = (4.0, 2.8)
FORMATS = (".svg", ".png", ".pdf")


def require_format(file: Path) -> None:
    """Raises:
    BenchFileError: the file is of no known kind.
    """
    if file.suffix not in FORMATS:
        raise BenchFileError(f"--plot {file}: takes a name that ends in one of {', '.join(FORMATS)}")


def experts_plot(results: Sequence[Result], file: Path) -> None:
    """Writes the picture: a panel for each shape, tokens across, the fraction of the roof up.

    Raises:
        BenchFileError: nothing was timed; the file is of no known kind, or cannot be written.
    """
    require_format(file)
    by_point = points(results)
    panels = list(dict.fromkeys((model, weights) for model, weights, _ in by_point))
    if not panels:
        raise BenchFileError(f"--plot {file}: nothing was timed, so there is nothing to draw")
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    with rc_context(_STYLE):
        figure = Figure(figsize=(across * _CELL_IN[0], down * _CELL_IN[1] + 0.4))
        drawn: dict[str, Any] = {}
        for place, (model, weights) in enumerate(panels, 1):
            axes = figure.add_subplot(down, across, place)
            for name in ORDER:
                line = sorted(
                    (M, point[name]["roof_us"] / point[name]["median_us"])
                    for (m, w, M), point in by_point.items()
                    if (m, w) == (model, weights) and name in point
                )
                if line:
                    (drawn[name],) = axes.plot(*zip(*line, strict=True), "o-", color=_COLOURS[name], markersize=3.5)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{model}, {weights}", fontsize=9)
            axes.set_xlabel("tokens")
            axes.set_ylabel("roof / time")
            axes.grid(visible=True)
        figure.legend(list(drawn.values()), list(drawn), loc="outside upper left", ncols=len(drawn), frameon=False)
        _save(figure, file)


def all_to_all_plot(results: Sequence[Result], file: Path) -> None:
    """Writes the picture: a panel for each hidden size, rows and mode, tokens across, microseconds up.

    Raises:
        BenchFileError: nothing was timed; the file is of no known kind, or cannot be written.
    """
    require_format(file)
    tables = timed(results)
    if not tables:
        raise BenchFileError(f"--plot {file}: nothing was timed, so there is nothing to draw")
    across = min(_ACROSS, len(tables))
    down = -(-len(tables) // across)
    with rc_context(_STYLE):
        figure = Figure(figsize=(across * _CELL_IN[0], down * _CELL_IN[1] + 0.8))
        drawn: dict[str, Any] = {}
        for place, ((ranks, H, rows, mode), peers) in enumerate(tables.items(), 1):
            axes = figure.add_subplot(down, across, place)
            for peer, of_T in peers.items():
                colour, dashes = _PEER_LOOKS.get(peer, ("#999999", ":"))
                line = sorted((T, r["median_us"]) for T, r in of_T.items())
                (drawn[peer],) = axes.plot(
                    *zip(*line, strict=True), marker="o", linestyle=dashes, color=colour, markersize=3
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"hidden {H}, {rows} rows, {mode}, {ranks} ranks", fontsize=9)
            axes.set_xlabel("tokens of each rank")
            axes.set_ylabel("round trip, us")
            axes.grid(visible=True)
        figure.legend(list(drawn.values()), list(drawn), loc="outside upper left", ncols=2 * across, frameon=False)
        _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise BenchFileError(f"{file} cannot be written: {error.strerror}") from error

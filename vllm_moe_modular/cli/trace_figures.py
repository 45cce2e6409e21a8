"""The figures of the trace page, as inline SVG. The one module that imports matplotlib.

Letters: L layers, W ranks, E the most experts of a rank, P phases, S sampled steps.
"""

import io
import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

Numbers = npt.NDArray[np.float64]

WIDTH_IN = 10.4
"""Of the widest figure, in inches: what the page is wide, so that no text is scaled."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": [
        "DejaVu Sans",
        "Verdana",
    ],  # equally wide: where a browser has only the latter, nothing overlaps
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "grid.color": "#e3e7eb",
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "text.parse_math": False,  # names of layers are no formulas
}
_PHASE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#999999")
"""Blue, orange, green, grey of Okabe and Ito, which colour-blind people tell apart."""

_LINE = _PHASE_COLOURS[0]
_MOST_LOAD = 3.0
_ROW_IN = 0.17
_MOST_NUMBERS = 8
"""Ranks up to which the matrix of rows has numbers in it; more would not be legible."""

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its font cache is of no interest to who reads a trace


def expert_load(load_LWE: Numbers, layers: Sequence[str]) -> str:
    """A heat map of loads, 1 is even; NaN: not there. Layers down, experts across in the order of ranks."""
    L, W, E = load_LWE.shape
    with rc_context(_STYLE):
        height_in = 1.4 + _ROW_IN * L
        figure = Figure(figsize=(min(WIDTH_IN, max(6.0, 2.5 + 0.2 * W * E)), height_in))
        axes = figure.add_subplot()
        colours = colormaps["PuOr_r"].with_extremes(bad="#dddddd")
        norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=_MOST_LOAD)
        image = axes.imshow(load_LWE.reshape(L, W * E), cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        axes.set_yticks(range(L), [name if len(name) < 40 else f"…{name[-39:]}" for name in layers], fontsize=8)
        axes.set_ylabel("layer")
        ranks = _every_few(W)
        axes.set_xticks([E * rank + (E - 1) / 2 for rank in ranks], [str(rank) for rank in ranks])
        axes.set_xlabel(f"rank, {E} expert{'s'[: E > 1]} each")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for rank in range(1, W):
            axes.axvline(E * rank - 0.5, color="white", linewidth=1.6)
        bar = figure.colorbar(
            image, ax=axes, location="bottom", shrink=0.6, aspect=45, extend="max", pad=0.1 / height_in
        )
        bar.set_ticks([0, 0.5, 1, 2, _MOST_LOAD], labels=["none", "half", "even", "twice", "3 times or more"])
        bar.outline.set_visible(False)
        return _svg(figure, "load")


def over_time(
    at_S: Numbers, y_S: Numbers, *, label: str, limits: tuple[float, float], band: tuple[Numbers, Numbers] | None = None
) -> str:
    """A line over seconds.

    Args:
        limits: of the axis of y.
        band: [S] each, behind the line.
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 2.6))
        axes = figure.add_subplot()
        marker = "o" if len(at_S) <= 100 else ""
        axes.plot(at_S, y_S, color=_LINE, linewidth=1.3, marker=marker, markersize=3.5, clip_on=False)
        if band is not None:
            axes.fill_between(at_S, *band, color=_LINE, alpha=0.2, linewidth=0)
        axes.set_ylim(*limits)
        axes.set_xlabel("seconds since the trace began")
        axes.set_ylabel(label)
        axes.grid(visible=True)
        return _svg(figure, label)


def phases(ms_WP: Numbers, ranks: Sequence[int], names: Sequence[str]) -> str:
    """A stacked bar for each rank, milliseconds."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 1.1 + len(ranks) * (0.3 if len(ranks) <= 16 else _ROW_IN)))
        axes = figure.add_subplot()
        places, left_W = np.arange(len(ranks)), np.zeros(len(ranks))
        for ms_W, name, colour in zip(ms_WP.T, names, _PHASE_COLOURS, strict=True):
            bars = axes.barh(places, ms_W, left=left_W, height=0.75, color=colour, label=name)
            left_W += ms_W
        axes.bar_label(bars, [f"{ms:.3g} ms" for ms in left_W], padding=4, fontsize=8)
        axes.set_yticks(places, [f"rank {rank}" for rank in ranks], fontsize=8)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_xlim(right=1.1 * max(left_W.max(), 1e-9))
        axes.set_xlabel("ms of a step")
        figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
        return _svg(figure, "phases")


def rows_between_ranks(rows_WW: Numbers) -> str:
    """From each rank (down) to each (across); NaN: not known."""
    W = len(rows_WW)
    size_in = min(7.0, max(2.4, 0.65 * W))
    with rc_context(_STYLE):
        figure = Figure(figsize=(size_in + 1.5, size_in))
        axes = figure.add_subplot()
        colours = colormaps["Blues"].with_extremes(bad="#dddddd")
        image = axes.imshow(rows_WW, cmap=colours, vmin=0, interpolation="nearest")
        axes.set_xticks(_every_few(W))
        axes.set_yticks(_every_few(W))
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        axes.tick_params(length=0)
        short = EngFormatter(places=None, sep="")
        figure.colorbar(image, ax=axes, label="rows", format=short)
        if W <= _MOST_NUMBERS:
            _write_numbers(axes, rows_WW, EngFormatter(places=1, sep=""))
        return _svg(figure, "rows")


def _write_numbers(axes: Axes, rows_WW: Numbers, short: EngFormatter) -> None:
    most = np.nanmax(rows_WW)
    for (down, across), rows in np.ndenumerate(rows_WW):
        if not np.isnan(rows):
            told = f"{rows:.0f}" if rows < 10_000 else short(rows)
            colour = "white" if rows > 0.6 * most else "black"
            axes.text(across, down, told, ha="center", va="center", fontsize=8, color=colour)


def _every_few(count: int) -> list[int]:
    """Of so many numbers, at most 33 that are written, so that they do not touch."""
    return list(range(0, count, 1 + (count - 1) // 33))


def _svg(figure: Figure, name: str) -> str:
    """The figure; `name`, which no other of the page has, makes the names inside of it unique."""
    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": name}):  # and the same traces give the same page
        # 216 dots an inch for the cells of a heat map; the text is none of dots.
        figure.savefig(drawn, format="svg", dpi=216, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawn.getvalue()
    return re.sub(r'<g id="[^"]+"', "<g", svg[svg.index("<svg") :])  # groups are numbered in each figure anew

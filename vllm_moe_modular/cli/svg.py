"""The three drawings of the trace page, as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1000
_LEFT = 70
_COLOURS = ("#2f6fb7", "#d9822b", "#3c9d6a", "#b5487a", "#7a63c7", "#8a7a3a", "#3aa3b5", "#a05a3c")
_HEAT = ("#eef3f8", "#cfe0f0", "#a9c8e6", "#7caad6", "#4f88bf", "#d98f4e", "#c9622f", "#9c3417")
_EVEN = 4.5
"""The step of `_HEAT` at which a load of 1 lies: blue up to there, and the stronger the orange the more above."""

_MOST_TOOLTIPS = 4000


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map: a load (1 is even), what it says under the pointer, whether a gap precedes it."""

    load: float
    tells: str
    starts_group: bool


def heat_map(rows: Sequence[Sequence[Cell]], *, labels: Sequence[str]) -> str:
    """A row of cells for each label."""
    columns = max(map(len, rows))
    gaps = max(sum(cell.starts_group for cell in row) for row in rows) * 3
    left = min(300, 14 + 7 * max(map(len, labels)))
    width = max(1.5, min(28.0, (WIDTH - left - gaps) / columns))
    height = 18 if len(rows) <= 40 else 10
    with_tooltips = sum(map(len, rows)) <= _MOST_TOOLTIPS
    drawn = []
    for y, (label, row) in enumerate(zip(labels, rows, strict=True)):
        drawn.append(f'<text x="{left - 8}" y="{y * height + height - 4}" text-anchor="end">{escape(label)}</text>')
        x = float(left)
        for number, cell in enumerate(row):
            x += 3 if cell.starts_group and number else 0
            box = f'x="{x:.1f}" y="{y * height}" width="{max(width - 0.5, 1):.1f}" height="{height - 1}"'
            tells = f"<title>{escape(cell.tells)} ({cell.load:.2f})</title>" if with_tooltips else ""
            drawn.append(f'<rect {box} fill="{_heat(cell.load)}">{tells}</rect>')
            x += width
    below = len(rows) * height + 14
    for number, (load, text) in enumerate(
        ((0, "none"), (0.5, "half"), (1, "even"), (2, "twice"), (3, "3 times or more"))
    ):
        x = left + 130 * number
        drawn.append(f'<rect x="{x}" y="{below}" width="14" height="14" fill="{_heat(load)}"/>')
        drawn.append(f'<text x="{x + 20}" y="{below + 12}">{text}</text>')
    return _svg(drawn, below + 24)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, unit: str = "", least_y: float = 0.0) -> str:
    """A line for each name, over the same axes."""
    points = [point for of in series.values() for point in of]
    if not points:
        return ""
    height, bottom = 220, 190
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    ticks = _ticks(least_y, max(p[1] for p in points))
    high_y = ticks[-1]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (point[1] - least_y) / (high_y - least_y)
        return _LEFT + across * (WIDTH - _LEFT - 20), bottom - up * (bottom - 24)

    drawn = []
    for tick in ticks:
        y = place((low_x, tick))[1]
        drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)} {unit}</text>')
    for number, (name, of) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(point) for point in of]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(places) <= 200:
            drawn += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}">'
                f"<title>{escape(name)}, {x} {_number(point[0])}: {_number(point[1])} {unit}</title></circle>"
                for (px, py), point in zip(places, of, strict=True)
            ]
    drawn.append(f'<text x="{_LEFT}" y="{bottom + 20}">{x} {_number(low_x)}</text>')
    drawn.append(f'<text x="{WIDTH - 20}" y="{bottom + 20}" text-anchor="end">{x} {_number(high_x)}</text>')
    return _svg([*drawn, *_legend(list(series), y=12)], height)


def bars(rows: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """A stacked bar for each row, of the same parts."""
    if not rows:
        return ""
    widest = max(sum(parts.values()) for parts in rows.values()) or 1.0
    names = list(next(iter(rows.values())))
    drawn = _legend(names, y=12)
    for y, (label, parts) in enumerate(rows.items()):
        top, x = 30 + 26 * y, float(_LEFT)
        drawn.append(f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>')
        for number, (name, value) in enumerate(parts.items()):
            width = value / widest * (WIDTH - _LEFT - 110)
            tells = f"<title>{escape(label)}, {escape(name)}: {_number(value)} {unit}</title>"
            colour = _COLOURS[number % len(_COLOURS)]
            drawn.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="18" fill="{colour}">{tells}</rect>')
            x += width
        drawn.append(f'<text x="{x + 8:.1f}" y="{top + 14}">{_number(sum(parts.values()))} {unit}</text>')
    return _svg(drawn, 40 + 26 * len(rows))


def _svg(drawn: Sequence[str], height: float) -> str:
    box = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">{"".join(drawn)}</svg>'


def _legend(names: Sequence[str], *, y: int) -> list[str]:
    drawn, x = [], float(_LEFT)
    for number, name in enumerate(names[:16]):
        drawn.append(
            f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
        )
        drawn.append(f'<text x="{x + 15:.0f}" y="{y}">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return drawn


def _heat(load: float) -> str:
    """Even loads lie where blue ends; three times as much is the strongest."""
    step = load * _EVEN if load <= 1 else _EVEN + (load - 1) / 2 * (len(_HEAT) - 1 - _EVEN)
    return _HEAT[min(int(step), len(_HEAT) - 1)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to at least `high`, four or five of them."""
    span = max(high - low, 1e-3)
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if size * factor * 4.5 >= span)
    count = max(1, math.ceil((high - low) / step - 1e-9))
    return [low + step * number for number in range(count + 1)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"

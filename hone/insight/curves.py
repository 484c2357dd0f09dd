"""Draw metric curves as text for the terminal, as an SVG for a notebook, and as a PNG. matplotlib is loaded only for a PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]  # (step, value) in increasing order of steps

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille dots by row and column of a 4 x 2 cell


def points(rows: Sequence[Mapping[str, float]], metric: str) -> list[tuple[float, float]]:
    """Return the curve of one metric in the rows of a metrics file; steps without it are left out."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


def sparkline(curve: Points, width: int = 40) -> str:
    """Draw a curve in one line of text; each character is the mean of its values.

    >>> sparkline([(0, 0.0), (1, 0.5), (2, 1.0)], width=3)
    '▁▅█'
    """
    cells = _resample(curve, min(width, len(curve)))
    finite = [value for value in cells if math.isfinite(value)]
    if not finite:
        return "?" * len(cells)
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join("?" if not math.isfinite(v) else _BLOCKS[math.floor((v - low) * scale + 0.5)] for v in cells)


def _resample(curve: Points, width: int) -> list[float]:
    edges = [round(index * len(curve) / width) for index in range(width + 1)] if width else [0]
    return [sum(value for _, value in curve[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def text_chart(curve: Points, *, width: int = 60, height: int = 8, compared_with: Sequence[Points] = ()) -> str:
    """Draw a curve as braille dots with its axes: ``2 width`` by ``4 height`` points.

    Values that are not finite are left out.

    Args:
        width: columns of the plot, without the axis labels.
        compared_with: curves of neighbouring charts; the axes cover them too, so that charts can be compared.
    """
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if not finite:
        return "(no values)"
    covered = finite + [(step, value) for compared in compared_with for step, value in compared if math.isfinite(value)]
    low, high = _span([value for _, value in covered])
    first, last = min(step for step, _ in covered), max(step for step, _ in covered)
    cells = [[0] * width for _ in range(height)]
    places = [
        (
            round((step - first) / (last - first) * (2 * width - 1)) if last > first else width,
            round((high - value) / (high - low) * (4 * height - 1)),
        )
        for step, value in finite
    ]
    for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
        for part in range(count := max(abs(x1 - x0), abs(y1 - y0), 1) + 1):
            x, y = round(x0 + (x1 - x0) * part / (count - 1)), round(y0 + (y1 - y0) * part / (count - 1))
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    labels = [_short(high), *[""] * (height - 2), _short(low)] if height > 1 else [_short(high)]
    margin = max(len(label) for label in labels)
    lines = [
        f"{label:>{margin}} ┤{''.join(chr(0x2800 + cell) for cell in row)}".rstrip("\u2800")
        for label, row in zip(labels, cells, strict=True)
    ]
    start, end = f"{first:g}", f"{last:g}"
    axis = f"{'':>{margin}}  {start}{end:>{max(width - len(start), len(end) + 1)}}"
    return "\n".join([*lines, axis])


def svg_curve(curve: Points, *, title: str, width: int = 480, height: int = 120) -> str:
    """Draw a curve as an SVG picture with its title, its range of values and its range of steps.

    Values that are not finite are left out.
    """
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if not finite:
        return ""
    (low, high), (first, last) = _span([value for _, value in finite]), _span([step for step, _ in finite])
    places = " ".join(
        f"{(step - first) / (last - first) * width:.1f},{(high - value) / (high - low) * height:.1f}"
        for step, value in finite
    )
    below = f'y="{height + 34}" font-size="11" fill="gray" font-family="sans-serif"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 {width + 8} {height + 40}" width="{width + 8}">'
        f'<text y="12" font-size="12" fill="gray" font-family="sans-serif">{html.escape(title)}: '
        f"{_short(finite[-1][1])} ({_short(low)} to {_short(high)})</text>"
        f'<g transform="translate(0 18)"><polyline points="{places}" fill="none" stroke="#1f77b4" stroke-width="1.6"/></g>'
        f'<text {below}>step {finite[0][0]:g}</text><text {below} x="{width}" text-anchor="end">{finite[-1][0]:g}</text></svg>'
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low < high:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def _short(value: float) -> str:
    return f"{value:.4g}"


def draw_png(path: str | Path, curves: Mapping[str, Mapping[str, Points]], *, title: str = "") -> Path:
    """Draw a PNG with one panel per metric and one line per run.

    Args:
        path: file to write; missing folders are created.
        curves: metric to run to curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(3, max(1, math.ceil(math.sqrt(len(curves)))))
    lines = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.1 * lines + (0.8 if title else 0.5)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    runs = list(dict.fromkeys(run for by_run in curves.values() for run in by_run))
    handles: dict[str, Line2D] = {}
    for number, (metric, by_run) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(lines, columns, number)
        for run, curve in by_run.items():
            steps, values = [step for step, _ in curve], [value for _, value in curve]
            colour = f"C{runs.index(run) % 10}"
            marker = "o" if len(curve) <= 12 else None  # a few validation points must stay visible
            (line,) = axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=run)
            handles.setdefault(run, line)
        axes.set_title(metric, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(4, len(runs)),
            fontsize=8,
            frameon=False,
        )
    if title:
        figure.suptitle(title, fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path

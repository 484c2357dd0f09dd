"""Picture of a run's coverage: fates by step, and distributions of dropped and trained prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.apps.lab.coverage.report import NAMES
from hone.insight.coverage.ledger import Fate
from hone.insight.coverage.reading import Coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {Fate.TRAINED: "C0", Fate.FILTERED: "C7", Fate.FAILED: "C3", Fate.TOO_OLD: "C1"}
_MOST_BARS = 120
_BINS = 24


def draw_coverage(path: str | Path, coverage: Coverage, *, title: str = "") -> Path:
    """Draw a PNG: stacked fates by step, and one panel per known characteristic of dropped and trained prompts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [name for name in NAMES if any(getattr(ended, name) is not None for ended in coverage.draws)]
    figure = Figure(figsize=(12, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, max(1, len(panels)))
    _draw_fates(figure.add_subplot(grid[0, :]), coverage)
    for column, name in enumerate(panels):
        _draw_characteristic(figure.add_subplot(grid[1, column]), coverage, name, legend=column == 0)
    if title:
        figure.suptitle(title, fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_fates(axes: Axes, coverage: Coverage) -> None:
    """Draw one stacked bar per step, or per block of steps in a long run."""
    steps = sorted(coverage.steps)
    width = -(-(steps[-1] - steps[0] + 1) // _MOST_BARS)
    bars = sorted({step - step % width for step in steps})
    counts = Counter((ended.step - ended.step % width, ended.fate) for ended in coverage.draws)
    bottom = [0] * len(bars)
    for fate, colour in _COLOURS.items():
        heights = [counts[bar, fate.value] for bar in bars]
        if any(heights):
            label = fate.value.replace("_", " ")
            middles = [bar + (width - 1) / 2 for bar in bars]
            axes.bar(middles, heights, width=0.9 * width, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _style(axes, "prompts by fate", "step" if width == 1 else f"step (blocks of {width})")
    if coverage.draws:
        axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_characteristic(axes: Axes, coverage: Coverage, name: str, *, legend: bool) -> None:
    """Draw the shares of values of dropped and of trained prompts."""
    import numpy as np

    sides: dict[str, list[Any]] = {"trained": [], "dropped": []}
    for ended in coverage.draws:
        if (value := getattr(ended, name)) is not None:
            sides["trained" if ended.fate == Fate.TRAINED else "dropped"].append(value)
    everything = [value for values in sides.values() for value in values]
    if name == "source":
        labels = [source for source, _ in Counter(everything).most_common(8)]
        for number, (side, values) in enumerate(sides.items()):
            shares = [values.count(label) / max(1, len(values)) for label in labels]
            places = np.arange(len(labels)) + (number - 0.5) * 0.4
            axes.bar(places, shares, width=0.4, color=("C0", "C3")[number], label=side)
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    else:
        edges = np.histogram_bin_edges(everything, bins=_BINS)
        for number, (side, values) in enumerate(sides.items()):
            if values:
                weights = np.full(len(values), 1 / len(values))
                axes.hist(
                    values, bins=edges.tolist(), weights=weights, alpha=0.5, color=("C0", "C3")[number], label=side
                )
    _style(axes, NAMES[name], "" if name == "source" else "tokens" if "tokens" in name else "mean of the group")
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _style(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

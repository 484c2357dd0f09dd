"""Chart of a forked episode: success by turn, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw(points: Sequence[tuple[int, float, tuple[float, float]]], title: str, path: Path) -> None:
    """Write a picture of (turn, success of continuations from before it, its interval); the file extension chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns, success = [turn for turn, _, _ in points], [value for _, value, _ in points]
    below = [value - low for _, value, (low, _) in points]
    above = [high - value for _, value, (_, high) in points]
    figure, axes = pyplot.subplots(figsize=(max(5.0, 0.6 * len(points) + 2), 3.2))
    axes.errorbar(
        turns, success, yerr=[[max(0.0, x) for x in below], [max(0.0, x) for x in above]], marker="o", capsize=3
    )
    axes.set(
        xlabel="turns replayed before the fork", ylabel="success of continuations", ylim=(-0.05, 1.05), title=title
    )
    axes.set_xticks(turns)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

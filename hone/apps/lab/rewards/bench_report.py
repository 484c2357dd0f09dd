"""Output of a reward bench: table, text histogram and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.rewards.bench import Bench, Trial
from hone.rewards.probes import KINDS

BINS = 10


def summary(bench: Bench) -> list[dict[str, Any]]:
    """Return one row per kind of answer: trials, failures, and min, mean and max reward (None without any)."""
    rows = []
    for kind in KINDS:
        trials = bench.of_kinds(kind)
        totals = bench.totals(kind)
        if trials:
            rows.append(
                {
                    "kind": kind,
                    "calls": len(trials),
                    "failed": len(trials) - len(totals),
                    "min": min(totals, default=None),
                    "mean": sum(totals) / len(totals) if totals else None,
                    "max": max(totals, default=None),
                }
            )
    best = list(bench.best("golden").values())
    if best:
        mean = sum(best) / len(best)
        rows.insert(
            0,
            {
                "kind": "golden (best form)",
                "calls": len(best),
                "failed": 0,
                "min": min(best),
                "mean": mean,
                "max": max(best),
            },
        )
    return rows


def forms(bench: Bench) -> dict[str, float]:
    """Return the mean reward of correct answers by their form."""
    by_form: dict[str, list[float]] = {}
    for trial in bench.of_kinds("golden"):
        if trial.score.error is None:
            by_form.setdefault(trial.probe.form, []).append(trial.score.total)
    return {form: sum(totals) / len(totals) for form, totals in by_form.items()}


def histogram(totals: Sequence[float], bins: int = BINS) -> list[tuple[float, float, int]]:
    """Return ``(low, high, count)`` of equal bins over the range of ``totals``; one bin if all are equal."""
    if not totals:
        return []
    low, high = min(totals), max(totals)
    if low == high:
        return [(low, high, len(totals))]
    width = (high - low) / bins
    counts = [0] * bins
    for total in totals:
        counts[min(bins - 1, int((total - low) / width))] += 1
    return [(low + number * width, low + (number + 1) * width, count) for number, count in enumerate(counts)]


def text_histogram(totals: Sequence[float], width: int = 40) -> list[str]:
    """Return a histogram as lines of text."""
    cells = histogram(totals)
    largest = max((count for _, _, count in cells), default=0)
    return [
        f"{low:8.3g} to {high:<8.3g} {'#' * round(width * count / largest):<{width}} {count}"
        for low, high, count in cells
    ]


def draw(bench: Bench, path: Path) -> None:
    """Write a picture with a histogram per kind of answer; the file extension chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if bench.totals(kind)]
    every = bench.totals(*kinds)
    low, high = min(every, default=0.0), max(every, default=1.0)
    spread = (low, high) if low < high else (low - 0.5, high + 0.5)
    figure, axes = pyplot.subplots(
        len(kinds) or 1, 1, sharex=True, figsize=(7, 1.3 * (len(kinds) or 1) + 0.8), squeeze=False
    )
    for kind, (axis,) in zip(kinds, axes, strict=False):
        axis.hist(bench.totals(kind), bins=30, range=spread, color="#3366aa")
        axis.set_ylabel(kind, rotation=0, ha="right", va="center")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("reward")
    figure.suptitle(f"Rewards of {len(bench.trials)} answers to {bench.rows} rows")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def trial_record(trial: Trial) -> dict[str, Any]:
    probe, score = trial.probe, trial.score
    return {
        "kind": probe.kind,
        "form": probe.form,
        "uid": probe.sample.uid,
        "data_source": probe.sample.data_source,
        "ground_truth": probe.sample.ground_truth,
        "text": probe.text if len(probe.text) <= 2000 else f"{probe.text[:2000]}... ({len(probe.text)} characters)",
        "score": score.total if score.error is None else None,
        "terms": score.terms,
        "error": score.error,
    }

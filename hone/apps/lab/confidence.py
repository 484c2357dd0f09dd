"""Confidence of a comparison of runs: arms, paired scores, and the verdict of each arm against the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.apps.lab.compare import Run
from hone.apps.lab.comparison.arms import SEED, split_arms
from hone.apps.lab.comparison.paired import Comparison, PairedScores, compare_paired, pair_scores
from hone.apps.lab.run_scores import RunScores
from hone.errors import HoneError


@dataclass(frozen=True)
class ArmComparison:
    """One arm compared with the first by one score."""

    score: str  # what was measured
    first: tuple[str, ...]
    second: tuple[str, ...]  # names of the runs of the other arm
    result: Comparison
    paired_by_seed: bool  # True if the runs of a pair share their seed

    def record(self) -> dict[str, Any]:
        return vars(self) | {"result": vars(self.result)}

    @property
    def limits(self) -> list[str]:
        """Return sentences on what the interval leaves out."""
        again = "repeat both runs with other values of trainer.seed"
        lines = []
        if math.isnan(self.result.low):
            lines.append(f"one number of one seed: no interval, so nothing tells the difference from noise; {again}")
        elif self.result.seeds == 1:
            lines.append(f"one seed: the interval is over prompts only; {again}")
        if not self.paired_by_seed:
            lines.append("the arms share no seed: paired by prompt only")
        return lines


def compare_arms(
    runs: Sequence[Run], scores: RunScores, *, level: float = 0.95, effect: float | None = None
) -> list[ArmComparison]:
    """Compare every arm among two or more runs with the first; runs with equal configurations apart from the seed form an arm.

    ``effect`` is the difference that the needed seeds should find; None means the observed one.
    """
    arms = split_arms([run.config for run in runs])
    results = []
    for other in arms[1:]:
        paired, by_seed = _paired(runs, scores.values, arms[0], other)
        result = compare_paired(paired, more_is_better=scores.more_is_better, level=level, effect=effect)
        first, second = (tuple(runs[index].name for index in arm) for arm in (arms[0], other))
        results.append(ArmComparison(scores.name, first, second, result, by_seed))
    return results


def compare_pair(first: Run, second: Run, scores: RunScores, *, level: float = 0.95) -> ArmComparison:
    """Compare one run with another, whatever their configurations."""
    paired, by_seed = _paired([first, second], scores.values, [0], [1])
    result = compare_paired(paired, more_is_better=scores.more_is_better, level=level)
    return ArmComparison(scores.name, (first.name,), (second.name,), result, by_seed)


def _paired(
    runs: Sequence[Run], values: Sequence[Mapping[str, float]], first: list[int], second: list[int]
) -> tuple[PairedScores, bool]:
    """Pair two arms by seed; without a common seed by the order of their runs."""
    sides: list[dict[str, Mapping[str, float]]] = [{}, {}]
    for side, arm in zip(sides, (first, second), strict=True):
        for index in arm:
            seed = str(runs[index].config.get(SEED, runs[index].record.get("seed")))
            while seed in side:
                seed += " again"
            side[seed] = values[index]
    by_seed = bool(sides[0].keys() & sides[1].keys())
    if not by_seed:
        sides = [dict(zip(map(str, range(len(side))), side.values(), strict=False)) for side in sides]
    try:
        return pair_scores(*sides), by_seed
    except ValueError:
        raise HoneError(
            "the runs have no prompt in common, so nothing can be paired",
            fix="compare runs that were validated on the same data.val_files",
            code="E-runs",
        ) from None

"""Confidence of a comparison of runs: arms, paired scores, and the verdict of each arm against the first.

Scores of runs by prompt, read for comparisons: of validation answers, else of training groups, else one number of a metric.

This is the only reader of sample files for comparisons: :func:`stored_samples`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import SEED, Run, less_is_better, split_arms
from hone.apps.lab.paired import Comparison, PairedScores, compare_paired, pair_scores
from hone.errors import HoneError, did_you_mean
from hone.insight.archive.read import open_archive
from hone.insight.coverage import read_coverage
from hone.insight.run_files import COVERAGE_FILE

SCORE = "score"
_MEAN = re.compile(r"val-(?:core|aux)/(?P<source>.+)/(?P<field>[^/]+)/mean@\d+")
_NUMBERS = ("critic/rewards/mean", "val/loss", "train/loss")


@dataclass(frozen=True)
class RunScores:
    """Scores of several runs, measured alike."""

    name: str  # what was measured, with its step
    # prompt to score for each run; the prompt is empty for a metric that has one number per run
    values: Sequence[Mapping[str, float]]
    more_is_better: bool  # False for losses


def stored_samples(folder: Path) -> dict[int, Callable[[], Iterable[dict[str, Any]]]]:
    """Return a reader of the sample records of each step of ``rollouts`` or ``validation`` that has some."""

    archive = open_archive(folder)
    return {step: functools.partial(archive.records, step) for step in archive.steps()}


def scores_in_common(runs: Sequence[Run], metric: str | None = None) -> RunScores | None:
    """Return the scores of runs, by prompt where the runs have them; None if they have none in common.

    ``metric`` is the name of a metric, ``score``, or a term or value of the scorer in the validation answers. None means the score of
    the last common validation; without validation answers the rewards of training in the last half of the common steps; without
    those the mean reward or the loss.
    """
    if metric is None:
        return _validation(runs, SCORE) or _training_rewards(runs) or _last_of(runs, _NUMBERS)
    mean = _MEAN.fullmatch(metric)
    if mean is None:
        return _last_of(runs, [metric]) or _validation(runs, metric)
    field = SCORE if mean["field"] == "reward" else mean["field"]
    return _validation(runs, field, mean["source"]) or _last_of(runs, [metric])


def require_scores(runs: Sequence[Run], metric: str | None = None) -> RunScores:
    """Return :func:`scores_in_common`."""
    scores = scores_in_common(runs, metric)
    if scores is None:
        named = ", ".join(run.name for run in runs)
        common = set.intersection(*(set(run.names()) for run in runs))
        wanted = f"metric or validation score '{metric}'" if metric else "scores"
        raise HoneError(
            f"{named} have no {wanted} in common",
            fix=did_you_mean(metric or "score", [*common, SCORE]),
            code="E-runs",
        )
    return scores


def _validation(runs: Sequence[Run], field: str, source: str | None = None) -> RunScores | None:
    """Return the mean of a field over the answers to each prompt, at the last validation that all runs have."""
    readers = [stored_samples(run.path / "validation") for run in runs]
    common = set.intersection(*(set(reader) for reader in readers))
    if not common:
        return None
    step = max(common)
    values = []
    for reader in readers:
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for record in reader[step]():
            value = _field(record, field)
            if value is not None and source in (None, record["data_source"]) and not record.get("part"):
                by_prompt[record["uid"]].append(value)
        values.append({prompt: math.fsum(answers) / len(answers) for prompt, answers in by_prompt.items()})
    if not all(values):
        return None
    return RunScores(f"validation {field}, step {step}", values, True)


def _field(record: Mapping[str, Any], field: str) -> float | None:
    value = record["score"] if field == SCORE else record["terms"].get(field, record["extra"].get(field))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _training_rewards(runs: Sequence[Run]) -> RunScores | None:
    """Return the mean reward of each prompt over the last half of the steps that all runs have."""
    last = min(run.steps for run in runs)
    if last == 0 or not all((run.path / COVERAGE_FILE).exists() for run in runs):
        return None
    first, values = last // 2 + 1, []
    for run in runs:
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for draw in read_coverage(run.path).draws:
            if draw.reward is not None and first <= draw.step <= last:
                by_prompt[draw.uid].append(draw.reward)
        values.append({prompt: math.fsum(rewards) / len(rewards) for prompt, rewards in by_prompt.items()})
    if not all(values):
        return None
    return RunScores(f"training reward, steps {first} to {last}", values, True)


def _last_of(runs: Sequence[Run], metrics: Sequence[str]) -> RunScores | None:
    """Return the first of the metrics that all runs have, at their last common step with it."""
    for metric in metrics:
        curves = [{int(row["step"]): row[metric] for row in run.metrics if metric in row} for run in runs]
        common = set.intersection(*(set(curve) for curve in curves))
        if common:
            step = max(common)
            values = [{"": curve[step]} for curve in curves]
            return RunScores(f"{metric}, step {step}", values, not less_is_better(metric))
    return None


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


class Unpaired(HoneError):
    """Two arms have no prompt in common."""


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
        raise Unpaired(
            "the runs have no prompt in common, so nothing can be paired",
            fix="compare runs that were validated on the same data.val_files, with trainer.log_val_generations above 0",
            code="E-runs",
        ) from None

"""Evaluation of scored answers to validation prompts, averaged by data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.data.types import Trajectory
from hone.insight.validation import validation_metrics
from hone.rewards.score import Score
from hone.trainers.reporting import sample_record


@dataclass
class Evaluation:
    """Scored answers to validation prompts.

    Attributes:
        metrics: ``val-core/...`` and ``val-aux/...``.
        trajectories: trajectories in dataset order, n per prompt.
    """

    metrics: dict[str, float]
    trajectories: Sequence[Trajectory]
    scores: Sequence[Score]

    def records(self, count: int | None = None) -> list[dict[str, Any]]:
        """Return the records of the first ``count`` answers (None: all), as written to files."""
        pairs = zip(self.trajectories[:count], self.scores[:count], strict=True)
        return [sample_record(trajectory, score) for trajectory, score in pairs]


def evaluate_answers(trajectories: Sequence[Trajectory], scores: Sequence[Score], n: int) -> Evaluation:
    """Evaluate scored answers, ``n`` per prompt; the segments of an episode share a score and count as one answer."""
    answers = [(t, score) for t, score in zip(trajectories, scores, strict=True) if t.part == 0]
    sources, uids = [t.sample.data_source for t, _ in answers], [t.uid for t, _ in answers]
    metrics = validation_metrics(sources, uids, score_columns([score for _, score in answers]), n)
    metrics["val-aux/no_verdict_rate"] = sum(score.error is not None for _, score in answers) / max(1, len(answers))
    return Evaluation(metrics, trajectories, scores)


def score_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """Return column ``reward`` and one for every term and extra, with None for missing values and without a verdict."""
    names = {name for score in scores for name in (*score.terms, *score.extra)}
    columns: dict[str, list[Any]] = {"reward": [None if score.error is not None else score.total for score in scores]}
    for name in sorted(names - {"reward"}):
        columns[name] = [score.terms.get(name, score.extra.get(name)) for score in scores]
    return columns

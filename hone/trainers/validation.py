"""Validation: answer held-out prompts, score them, and average by data source."""

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
    """Scored answers to held-out prompts.

    Attributes:
        metrics: ``val-core/...`` and ``val-aux/...``.
        trajectories: in the order of the dataset, n a prompt.
        scores: of each trajectory.
    """

    metrics: dict[str, float]
    trajectories: Sequence[Trajectory]
    scores: Sequence[Score]

    def records(self, count: int | None = None) -> list[dict[str, Any]]:
        """The first ``count`` answers (None: all) as they are written to files."""
        pairs = zip(self.trajectories[:count], self.scores[:count], strict=True)
        return [sample_record(trajectory, score) for trajectory, score in pairs]


def measured(trajectories: Sequence[Trajectory], scores: Sequence[Score], n: int) -> Evaluation:
    """The evaluation of scored answers, ``n`` a prompt; an episode of several parts, which share a score, is one
    answer."""
    told = [(t, score) for t, score in zip(trajectories, scores, strict=True) if t.part == 0]
    sources, uids = [t.sample.data_source for t, _ in told], [t.uid for t, _ in told]
    metrics = validation_metrics(sources, uids, score_columns([score for _, score in told]), n)
    return Evaluation(metrics, trajectories, scores)


def score_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """Column ``reward`` and one for every term and extra; None where a score lacks it."""
    names = {name for score in scores for name in (*score.terms, *score.extra)}
    columns: dict[str, list[Any]] = {"reward": [score.total for score in scores]}
    for name in sorted(names - {"reward"}):
        columns[name] = [score.terms.get(name, score.extra.get(name)) for score in scores]
    return columns

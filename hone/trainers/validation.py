"""Evaluation of scored answers to validation prompts, averaged by data source: mean, spread, best, worst and majority of the answers.

``best@k`` is the expected best score of k of the N responses, drawn without replacement. With the scores sorted,
``x_1 <= ... <= x_N``, the best of a draw is ``x_i`` in ``C(i - 1, k - 1)`` of ``C(N, k)`` draws, so

    best@k = sum_i x_i C(i - 1, k - 1) / C(N, k)        (for 0/1 scores: pass@k of Chen et al. 2021, eq. 1)

``worst@k`` is the same from the other end. ``maj@k`` is the expected score of the most frequent prediction among k
drawn responses, ties shared evenly; see :func:`majority_weights`. All three are exact: no bootstrap, no random numbers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.data.types import Trajectory
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


def validation_metrics(
    data_sources: Sequence[str], uids: Sequence[str], infos: Mapping[str, Sequence[Any]], n: int
) -> dict[str, float]:
    """Summarise validation scores by data source. Each list has one entry per response.

    Numbers are averaged over the problems of a source. ``core`` is ``acc`` if the source has it, else ``reward``.
    ``mean@n``, ``best@n/mean`` and ``maj@n/mean`` of ``core`` are named ``val-core/<source>/<core>/...``, all others
    (``std@n``, ``worst@k``, smaller k = 2, 4, 8, ..., other keys) ``val-aux/<source>/<key>/...``.

    Args:
        uids: problem of each response; every (source, uid) has n responses.
        infos: per-response values by key: ``reward``, ``acc``, other terms (numbers or booleans), ``pred`` (any answer;
            None, a missing answer, votes as a separate answer). Keys without numbers are skipped. None means that
            the response has no such value; a problem with fewer than k values counts with all it has.

    Returns:
        Metric name to value, sorted by name.

    Raises:
        ValueError: lists differ in length, or a problem does not have n responses.
    """
    lengths = {key: len(values) for key, values in infos.items() if len(values) != len(uids)}
    if lengths or len(data_sources) != len(uids):
        raise ValueError(f"{len(uids)} responses, but {len(data_sources)} data sources and lists of {lengths}")
    rows: dict[str, dict[str, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        rows.setdefault(source, {}).setdefault(uid, []).append(row)
    metrics: dict[str, float] = {}
    for source, problems in rows.items():
        short = {uid: len(group) for uid, group in problems.items() if len(group) != n}
        if short:
            raise ValueError(
                f"{len(short)} problems of '{source}' do not have {n} responses, e.g. {next(iter(short.items()))}"
            )
        metrics.update(_source_metrics(source, list(problems.values()), infos, n))
    return dict(sorted(metrics.items()))


def _source_metrics(
    source: str, problems: list[list[int]], infos: Mapping[str, Sequence[Any]], n: int
) -> dict[str, float]:
    numeric = {
        key: values
        for key, values in infos.items()
        if key != "pred" and _is_numeric([values[row] for group in problems for row in group])
    }
    core = "acc" if "acc" in numeric else "reward"
    metrics = {}
    for key, values in numeric.items():
        gathered: dict[str, list[float]] = {}
        for group in problems:
            scored = [row for row in group if values[row] is not None]
            if scored:
                preds = [infos["pred"][row] for row in scored] if "pred" in infos else None
                for name, value in _problem_metrics([float(values[row]) for row in scored], preds, n).items():
                    gathered.setdefault(name, []).append(value)
        for name, per_problem in gathered.items():
            is_core = key == core and name in {f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean"}
            section = "val-core" if is_core else "val-aux"
            metrics[f"{section}/{source}/{key}/{name}"] = math.fsum(per_problem) / len(per_problem)
    return metrics


def _problem_metrics(values: list[float], preds: list[Any] | None, n: int) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    metrics = {f"mean@{n}": mean}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    for k in subset_sizes(n):
        size = min(k, len(values))
        metrics[f"best@{k}/mean"] = best_of(values, size)
        metrics[f"worst@{k}/mean"] = -best_of([-value for value in values], size)
        if preds is not None:
            metrics[f"maj@{k}/mean"] = majority(values, preds, size)
    return metrics


def subset_sizes(n: int) -> list[int]:
    """Return the k of best@k: 2, 4, 8, ... below n, then n itself.

    >>> subset_sizes(8), subset_sizes(6), subset_sizes(2)
    ([2, 4, 8], [2, 4, 6], [2])
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n]


def best_of(values: Sequence[float], k: int) -> float:
    """Return the expected largest of k values drawn without replacement.

    >>> best_of([0.0, 0.0, 1.0, 0.0], 2)
    0.5
    """
    draws = math.comb(len(values), k)
    return math.fsum(value * (math.comb(rank, k - 1) / draws) for rank, value in enumerate(sorted(values)))


def majority(values: Sequence[float], preds: Sequence[Any], k: int) -> float:
    """Return the expected score of the most frequent prediction among k responses drawn without replacement.

    Ties are shared evenly among the most frequent predictions; the score of a prediction is the mean over its
    responses. This equals the average over random orders in which the first of the most frequent predictions wins.

    >>> majority([1.0, 1.0, 0.0], ["7", "7", "8"], 3)
    1.0
    """
    classes: dict[Hashable, list[float]] = {}
    for value, pred in zip(values, preds, strict=True):
        classes.setdefault(_hashable(pred), []).append(value)
    chance = majority_weights(tuple(sorted(len(scores) for scores in classes.values())), k)
    return math.fsum(chance[len(scores)] * (math.fsum(scores) / len(scores)) for scores in classes.values())


@functools.lru_cache(maxsize=4096)
def majority_weights(counts: tuple[int, ...], k: int) -> dict[int, float]:
    """Return the chance that a prediction wins a vote of k responses drawn without replacement, by its count.

    A prediction that occurs c times wins with m votes, tied with t others, in ``C(c, m) x W(m, t)`` of ``C(N, k)``
    draws, where ``W`` counts the ways to draw the other k - m votes with at most m for each prediction and m for
    exactly t; it then gets ``1 / (t + 1)`` of the win. ``W`` comes from multiplying one polynomial per prediction.

    Args:
        counts: occurrences of each distinct prediction, sorted.
        k: votes drawn, at most ``sum(counts)``.
    """
    draws = math.comb(sum(counts), k)
    chances = {}
    for count in set(counts):
        others = list(counts)
        others.remove(count)
        chance = 0.0
        for votes in range(1, min(count, k) + 1):
            ways = _ways(others, votes, k - votes)
            chance += math.fsum(math.comb(count, votes) * number / draws / (ties + 1) for ties, number in ways.items())
        chances[count] = chance
    return chances


def _ways(counts: list[int], limit: int, votes: int) -> dict[int, int]:
    """Return the number of ways to draw ``votes`` from predictions of these counts, none above ``limit``, by how many reach it."""
    table: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # (votes drawn, predictions at the limit) -> ways
    for count in counts:
        grown: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), number in table.items():
            for extra in range(min(count, limit, votes - drawn) + 1):
                grown[drawn + extra, ties + (extra == limit)] += number * math.comb(count, extra)
        table = grown
    return {ties: number for (drawn, ties), number in table.items() if drawn == votes}


def _is_numeric(values: list[Any]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(value, (bool, int, float)) or hasattr(value, "__float__") for value in present
    )


def _hashable(pred: Any) -> Hashable:
    return pred if isinstance(pred, (str, int, float, bool, type(None))) else repr(pred)

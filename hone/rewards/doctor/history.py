"""Record of the tasks of a run: tries, missing verdicts, skips, time limits, and results of probes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.data.episode_log import CallStatus, EpisodeEnd
from hone.data.types import Trajectory, row_of
from hone.rewards.score import Cause, Score

LATEST = 256  # number of latest responses that rates of time limits are taken over
SHOWN = 3  # number of episodes kept as evidence, of each task and kind
_TEXT = 400


@dataclass
class Task:
    """Counts of one dataset row."""

    tries: int = 0  # responses
    missing: int = 0  # responses without a verdict
    skipped: int = 0  # passing responses whose verifier reports that it skipped, or ran no test
    probes: Counter[str] = field(default_factory=Counter)  # number of probes by kind
    hits: Counter[str] = field(default_factory=Counter)  # number of probes by kind in which the defect showed
    best: float | None = None  # highest reward; None before the first verdict


@dataclass(frozen=True)
class Limits:
    """Time limits that one response reached."""

    scoring: bool  # whether its scoring timed out
    episode: bool  # whether its episode reached ``max_episode_seconds``
    calls: Mapping[str, tuple[int, int]]  # number of calls and of timeouts by tool


class History:
    """Record of a run's tasks.

    Attributes:
        tasks: by the uid of the row.
        latest: time limits of the latest responses.
        evidence: episodes by kind of defect and task.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.latest: deque[Limits] = deque(maxlen=LATEST)
        self.evidence: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def observe(self, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        """Count the first segments of a step's episodes, with and without a verdict."""
        for trajectory, score in zip(trajectories, scores, strict=True):
            if trajectory.part:
                continue
            name = row_of(trajectory.uid)
            task = self.tasks.setdefault(name, Task())
            task.tries += 1
            if score.error is not None:
                task.missing += 1
                self.keep("missing", name, trajectory, score)
            else:
                task.best = score.quality if task.best is None else max(task.best, score.quality)
                if is_skip(score) and score.passes:
                    task.skipped += 1
                    self.keep("skip", name, trajectory, score)
            self._limits(name, trajectory, score)

    def probed(self, kind: str, trajectory: Trajectory, score: Score, *, hit: bool) -> None:
        """Count a probe of a task; ``score`` is that of the probe."""
        name = row_of(trajectory.uid)
        task = self.tasks.setdefault(name, Task())
        task.probes[kind] += 1
        if hit:
            task.hits[kind] += 1
            self.keep(kind, name, trajectory, score)

    def keep(self, kind: str, name: str, trajectory: Trajectory, score: Score) -> None:
        kept = self.evidence.setdefault((kind, name), [])
        if len(kept) < SHOWN:
            kept.append(episode_record(trajectory, score))

    def _limits(self, name: str, trajectory: Trajectory, score: Score) -> None:
        log = trajectory.episode
        calls: dict[str, tuple[int, int]] = {}
        for call in log.calls if log is not None else ():
            made, late = calls.get(call.name, (0, 0))
            calls[call.name] = made + 1, late + (call.status is CallStatus.TIMEOUT)
        ended = log is not None and log.end is EpisodeEnd.TIME
        limits = Limits(score.cause == Cause.TIMEOUT, ended, calls)
        self.latest.append(limits)
        if limits.scoring or limits.episode or any(late for _, late in calls.values()):
            self.keep("time", name, trajectory, score)


def is_skip(score: Score) -> bool:
    """Return whether a verifier reports that it judged nothing: a value named skip, or a number of tests that is 0."""
    values: dict[str, Any] = {**score.terms, **score.extra}
    skipped = any("skip" in name.casefold() and bool(value) for name, value in values.items())
    return skipped or any(values.get(name) == 0 for name in ("tests", "num_tests", "tests_run"))


def episode_record(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    """Return an episode in short form: its identity, the end of its text, and its score or the reason for none."""
    return {
        "uid": trajectory.uid,
        "index": trajectory.index,
        "text": trajectory.text[-_TEXT:],
        "score": score.verdict,
        "error": score.error,
        "end": None if trajectory.episode is None else trajectory.episode.end.value,
    }

"""Environment doctor: finds defects of verifiers, tools and tasks while a run trains.

    every step:  trajectories, scores ──▶ History ──▶ detectors ──▶ findings (log, doctor.jsonl, proposal of a quarantine)
                        └─ some responses ──▶ Prober, in the background ──▶ History

The doctor changes nothing: it only names tasks. ``data.quarantine`` leaves them out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hone.config.reward import RewardConfig
from hone.data.episode_log import CallStatus, EpisodeEnd
from hone.data.types import Trajectory, row_of
from hone.errors import HoneError
from hone.rewards.manager import RewardManager
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


FEWEST_TRIES = 4  # responses of a task from which on its rate of missing verdicts counts
FEWEST_MISSING = 6
FEWEST_CALLS = 16  # calls or responses from which on a rate of time limits counts
TIMEOUT_SHARE = 0.3  # share of calls at a time limit that is a finding


@dataclass(frozen=True)
class Finding:
    """A defect with its evidence."""

    kind: str
    what: str
    why: str
    fix: str
    # uids of the rows concerned; empty if the defect is not one of tasks
    tasks: list[str] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)  # up to three episodes
    # what the defect is of, where one kind can be of several things, such as one of several time limits
    about: str = ""


def findings(history: History) -> Iterator[Finding]:
    for detector in DETECTORS:
        yield from detector(history)


class _ProbeDefect(NamedTuple):
    """Defect that probes of a kind show: its name, the probe, texts, and the share of a task's probes that must show it."""

    name: str
    probe: str
    what: str
    why: str
    fix: str
    least_share: float = 0.0


_FOR_NOTHING = ("the policy learns to say nothing, or to break the verifier", "give such answers the lowest reward")
_PROBE_DEFECTS = (
    _ProbeDefect(
        "passes_empty", "empty", "an empty answer passes, with at least the best reward of the task", *_FOR_NOTHING
    ),
    _ProbeDefect(
        "passes_traceback",
        "traceback",
        "the text of an exception passes, with at least the best reward of the task",
        *_FOR_NOTHING,
    ),
    _ProbeDefect(
        "ignores_answer",
        "foreign",
        "right answers to other tasks pass, whose ground truth differs",
        "the verdict does not depend on the answer, so these tasks reward anything",
        "compare with ground_truth in the verifier of these tasks",
        0.5,
    ),
    _ProbeDefect(
        "does_not_repeat",
        "repeat",
        "the same response has another reward when it is scored again",
        "the noise of the verdict is noise of the gradient, and a run does not repeat",
        "remove random numbers, clocks and shared state from the verifier",
    ),
)


def defects_that_probes_show(history: History) -> Iterator[Finding]:
    """Find tasks whose verifier answers a probe as a sound one would not, at least twice in all."""
    for defect in _PROBE_DEFECTS:
        kind = defect.probe
        tasks = [
            name for name, task in history.tasks.items() if task.hits[kind] > defect.least_share * task.probes[kind]
        ]
        hits = sum(history.tasks[name].hits[kind] for name in tasks)
        if hits >= 2:
            what = f"{defect.what} ({hits} times in {len(tasks)} tasks)"
            yield Finding(defect.name, what, defect.why, defect.fix, tasks, _evidence(history, kind, tasks))


def failures_in_few_tasks(history: History) -> Iterator[Finding]:
    """Find few tasks that have most of the missing verdicts."""
    missing = sum(task.missing for task in history.tasks.values())
    bad = [n for n, t in history.tasks.items() if t.tries >= FEWEST_TRIES and t.missing >= 0.75 * t.tries]
    held = sum(history.tasks[name].missing for name in bad)
    if missing >= FEWEST_MISSING and bad and held >= 0.5 * missing and len(bad) <= max(1, len(history.tasks) // 4):
        yield Finding(
            "failing_tasks",
            f"{len(bad)} of {len(history.tasks)} tasks have {held} of the {missing} missing verdicts",
            "their episodes cost time and teach nothing: the environment of these tasks is broken",
            "repair them, or leave them out",
            bad,
            _evidence(history, "missing", bad),
        )


def time_limits_that_pin(history: History) -> Iterator[Finding]:
    """Find time limits that a large share of calls or responses reaches."""
    latest = history.latest
    made: Counter[str] = Counter()
    late: Counter[str] = Counter()
    for limits in latest:
        for tool, (calls, timeouts) in limits.calls.items():
            made[tool] += calls
            late[tool] += timeouts
    rates = [(f"calls of the tool {tool}", late[tool], made[tool], "multi_turn.tool_timeout") for tool in sorted(made)]
    rates.append(("scorings", sum(limits.scoring for limits in latest), len(latest), "reward.timeout"))
    rates.append(("episodes", sum(limits.episode for limits in latest), len(latest), "multi_turn.max_episode_seconds"))
    for what, count, total, key in rates:
        if total >= FEWEST_CALLS and count >= TIMEOUT_SHARE * total:
            tasks = [name for kind, name in history.evidence if kind == "time"]
            yield Finding(
                "time_limit",
                f"{count} of the latest {total} {what} reached their time limit",
                "the limit decides what is rewarded, not the answer",
                f"raise {key}, or make them faster",
                [],
                _evidence(history, "time", tasks),
                about=what,
            )


def skips_that_pass(history: History) -> Iterator[Finding]:
    """Find tasks whose verifier reports that it skipped, or ran no test, and passes the response."""
    tasks = [name for name, task in history.tasks.items() if task.skipped]
    count = sum(history.tasks[name].skipped for name in tasks)
    if count >= 2:
        yield Finding(
            "skip_passes",
            f"{count} responses to {len(tasks)} tasks pass although their verifier reports that it judged nothing",
            "a skipped check is not a right answer",
            "return None (no verdict) where nothing was judged",
            tasks,
            _evidence(history, "skip", tasks),
        )


DETECTORS: tuple[Callable[[History], Iterator[Finding]], ...] = (
    defects_that_probes_show,
    failures_in_few_tasks,
    time_limits_that_pin,
    skips_that_pass,
)


def _evidence(history: History, kind: str, tasks: list[str]) -> list[dict[str, Any]]:
    episodes = [episode for name in tasks for episode in history.evidence.get((kind, name), ())]
    return episodes[:SHOWN]


TRACEBACK = 'Traceback (most recent call last):\n  File "solution.py", line 1, in <module>\nTimeoutError: timed out'
KINDS = ("repeat", "foreign", "empty", "traceback")  # kinds of probes
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Probe:
    """One response to score again."""

    kind: str  # of :data:`KINDS`
    trajectory: Trajectory  # the response, with the text of the probe
    score: Score  # score of the original response


def probes_of(trajectories: Sequence[Trajectory], scores: Sequence[Score], count: int) -> list[Probe]:
    """Return the probes of up to ``count`` responses, of different tasks; passing ones come first.

    A foreign answer passed on another task, whose ground truth differs: it should not pass here.
    """
    judged = [(t, s) for t, s in zip(trajectories, scores, strict=True) if s.error is None and not t.part]
    judged.sort(key=lambda pair: not pair[1].passes)
    chosen = list({row_of(t.uid): (t, s) for t, s in reversed(judged)}.values())[::-1]
    chosen.sort(key=lambda pair: not pair[1].passes)
    best = max((s.quality for _, s in judged), default=0.0)
    right = [t for t, s in judged if is_right(s, best)]
    probes: list[Probe] = []
    for trajectory, score in chosen[:count]:
        probes.append(Probe("repeat", trajectory, score))
        other = next((t for t in right if differs(t, trajectory)), None)
        for kind, text in (("foreign", other and other.text), ("empty", ""), ("traceback", TRACEBACK)):
            if text is not None:
                probes.append(Probe(kind, replace(trajectory, text=text, episode=None), score))
    return probes


def differs(other: Trajectory, trajectory: Trajectory) -> bool:
    """Return whether a response is to another task, with another ground truth and another text."""
    truths = [t.sample.ground_truth for t in (other, trajectory)]
    if None in truths or other.text.strip() == trajectory.text.strip():
        return False
    return row_of(other.uid) != row_of(trajectory.uid) and _plain(truths[0]) != _plain(truths[1])


def _plain(truth: object) -> object:
    try:
        return float(str(truth))
    except ValueError:
        return str(truth).strip().casefold()


def is_right(score: Score, best: float) -> bool:
    """Return whether a response passes; a reward without ``acc``, which may be a share, counts from ``best`` up."""
    return score.passes and ("acc" in score.terms or score.quality >= best)


def is_hit(probe: Probe, again: Score, best: float | None, best_of_run: float) -> bool:
    """Return whether a probe shows its defect; ``best`` is the task's highest reward so far, ``best_of_run`` that of all tasks."""
    if again.error is not None:
        return False
    if probe.kind == "repeat":
        return (
            abs(again.total - (probe.score.unshaped if probe.score.unshaped is not None else probe.score.total))
            > _ROUNDING
        )
    as_good = is_right(again, best_of_run) and again.total >= (best or 0.0)
    return as_good and (probe.kind != "foreign" or is_right(probe.score, best_of_run))


class Prober:
    """Scores probes in a thread, with worker processes of its own, while the run trains. ``failed``: batches of probes
    that could not be scored.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.failed = 0
        quiet = replace(
            config, max_no_verdict_rate=1.0, max_retries=0, num_workers=1, reward_model=type(config.reward_model)()
        )
        self._config = quiet
        self._manager: RewardManager | None = None
        self._starting, self._closed = threading.Lock(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="doctor")
        self._running: tuple[list[Probe], Future[list[Score]]] | None = None

    def submit(self, probes: list[Probe]) -> None:
        """Begin to score probes, unless earlier ones are still being scored."""
        if self._running is None and probes:
            self._running = probes, self._thread.submit(self._score, [probe.trajectory for probe in probes])

    def collect(self, history: History, *, wait: bool = False) -> None:
        """Add results that are there to the history; ``wait`` waits for them."""
        if self._running is None or not (wait or self._running[1].done()):
            return
        probes, future = self._running
        self._running = None
        try:
            scores = future.result()
        except HoneError as error:
            self.failed += 1
            if self.failed == 1:  # an environment that scores its own episodes fails in every step
                log.warning("the environment doctor cannot score its probes, also in later steps: %s", error.what)
            return
        best_of_run = max((task.best for task in history.tasks.values() if task.best is not None), default=0.0)
        for probe, again in zip(probes, scores, strict=True):
            task = history.tasks.get(row_of(probe.trajectory.uid))
            hit = is_hit(probe, again, None if task is None else task.best, best_of_run)
            history.probed(probe.kind, probe.trajectory, again, hit=hit)

    def close(self) -> None:
        """End the thread and its processes; probes under way are dropped."""
        if self.failed > 1:
            log.warning("the environment doctor could not score its probes in %d steps", self.failed)
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._starting:  # a process that is just starting is ended too
            if self._manager is not None:
                self._manager.close()

    def _score(self, trajectories: list[Trajectory]) -> list[Score]:
        with self._starting:
            if self._closed:
                return []
            self._manager = self._manager or RewardManager(self._config)
        numbered = [replace(trajectory, index=number) for number, trajectory in enumerate(trajectories)]
        return asyncio.run(self._manager.score(numbered))


log = logging.getLogger(__name__)

FILE, QUARANTINE = "doctor.jsonl", "quarantine.jsonl"
"""Files in the run directory: all findings, and the rows that they propose to leave out."""
_SHOWN_TASKS = 5


class EnvironmentDoctor:
    """Observer of a run's episodes and verdicts.

    Its record is empty in a resumed process. It changes neither rewards nor data. ``probes``: whether the verifier may
    be called again: it costs nothing and has no other effect.
    """

    def __init__(self, config: RewardConfig, folder: Path, *, probes: bool) -> None:
        self._settings, self._folder = config.doctor, folder
        self.history = History()
        self._prober = Prober(config) if probes and config.doctor.probes_per_step else None
        self._reported: dict[tuple[str, str], tuple[int, set[str]]] = {}
        self._quarantined: set[str] = set()

    def observe(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Finding]:
        """Add a step's episodes, and report defects that are new or whose cool-down is over."""
        self.history.observe(trajectories, scores)
        if self._prober is not None:
            self._prober.collect(self.history)
            self._prober.submit(probes_of(trajectories, scores, self._settings.probes_per_step))
        return self.report(step)

    def report(self, step: int) -> list[Finding]:
        due = [finding for finding in findings(self.history) if self._is_due(step, finding)]
        for finding in due:
            self._write(step, finding)
        return due

    def finish(self, step: int) -> list[Finding]:
        if self._prober is not None:
            self._prober.collect(self.history, wait=True)
        return self.report(step)

    def close(self) -> None:
        if self._prober is not None:
            self._prober.close()

    def _is_due(self, step: int, finding: Finding) -> bool:
        key = finding.kind, finding.about
        last, tasks = self._reported.get(key, (None, set()))
        if last is not None and (
            step - last < self._settings.cooldown or (finding.tasks and tasks >= set(finding.tasks))
        ):
            return False
        self._reported[key] = step, tasks | set(finding.tasks)
        return True

    def _write(self, step: int, finding: Finding) -> None:
        shown = ", ".join(finding.tasks[:_SHOWN_TASKS]) + (", ..." if len(finding.tasks) > _SHOWN_TASKS else "")
        new = [name for name in finding.tasks if name not in self._quarantined]
        self._quarantined.update(new)
        self._append(FILE, [{"step": step, **vars(finding)}])
        self._append(QUARANTINE, [{"uid": name, "reason": finding.kind, "step": step} for name in new])
        log.warning(
            "environment doctor, step %d: %s%s.\n  Why it matters: %s\n  Fix: %s%s",
            step,
            finding.what,
            f" ({shown})" if shown else "",
            finding.why,
            finding.fix,
            f"; data.quarantine={self._folder / QUARANTINE} leaves them out" if finding.tasks else "",
        )
        for episode in finding.episodes:
            score = "no verdict" if episode["score"] is None else f"score {episode['score']:g}"
            log.warning("  row %s, episode %s, %s: %r", episode["uid"], episode["index"], score, episode["text"][-200:])

    def _append(self, name: str, records: list[dict]) -> None:
        if records:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)


__all__ = ["EnvironmentDoctor", "Finding", "History"]

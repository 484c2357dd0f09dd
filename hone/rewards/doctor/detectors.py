"""Detectors of the environment doctor: each reads the history and names tasks with a defect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hone.rewards.doctor.history import SHOWN, History, Task

FEWEST_TRIES = 4
"""Responses of a task from which on its rate of missing verdicts counts."""
FEWEST_MISSING = 6
FEWEST_CALLS = 16
"""Calls or responses from which on a rate of time limits counts."""
TIMEOUT_SHARE = 0.3
"""Share of calls at a time limit that is a finding."""


@dataclass(frozen=True)
class Finding:
    """A defect with its evidence.

    Attributes:
        kind: name of the defect.
        what: description with numbers.
        why: why it matters.
        fix: what to do.
        tasks: uids of the rows concerned; empty if the defect is not one of tasks.
        episodes: up to three episodes.
    """

    kind: str
    what: str
    why: str
    fix: str
    tasks: list[str] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)


def findings(history: History) -> Iterator[Finding]:
    """Yield what all detectors find now."""
    for detector in DETECTORS:
        yield from detector(history)


def rewards_for_nothing(history: History) -> Iterator[Finding]:
    """Find tasks whose verifier passes an empty answer or the text of an exception."""
    for kind, shown in (("empty", "an empty answer"), ("traceback", "the text of an exception")):
        tasks = _hit(history, kind)
        if sum(history.tasks[name].hits[kind] for name in tasks) >= 2:
            yield Finding(
                f"passes_{kind}",
                f"{shown} passes in {len(tasks)} tasks, with at least the reward of the best response",
                "the policy learns to say nothing, or to break the verifier",
                "give such answers the lowest reward",
                tasks,
                _evidence(history, kind, tasks),
            )


def verdict_without_answer(history: History) -> Iterator[Finding]:
    """Find tasks on which right answers to other tasks pass."""
    tasks = [name for name in _hit(history, "foreign") if _share(history.tasks[name], "foreign") > 0.5]
    hits = sum(history.tasks[name].hits["foreign"] for name in tasks)
    if hits >= 2:
        yield Finding(
            "ignores_answer",
            f"right answers to other tasks pass in {len(tasks)} tasks ({hits} times), whose ground truth differs",
            "the verdict does not depend on the answer, so these tasks reward anything",
            "compare with ground_truth in the verifier of these tasks",
            tasks,
            _evidence(history, "foreign", tasks),
        )


def verdict_that_changes(history: History) -> Iterator[Finding]:
    """Find tasks on which the same response scores differently when it is scored again."""
    tasks = _hit(history, "repeat")
    hits = sum(history.tasks[name].hits["repeat"] for name in tasks)
    if hits >= 2:
        yield Finding(
            "does_not_repeat",
            f"the same response has another reward when it is scored again, in {len(tasks)} tasks ({hits} times)",
            "the noise of the verdict is noise of the gradient, and a run does not repeat",
            "remove random numbers, clocks and shared state from the verifier",
            tasks,
            _evidence(history, "repeat", tasks),
        )


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
    rewards_for_nothing,
    verdict_without_answer,
    verdict_that_changes,
    failures_in_few_tasks,
    time_limits_that_pin,
    skips_that_pass,
)


def _hit(history: History, kind: str) -> list[str]:
    return [name for name, task in history.tasks.items() if task.hits[kind]]


def _share(task: Task, kind: str) -> float:
    return task.hits[kind] / max(1, task.probes[kind])


def _evidence(history: History, kind: str, tasks: list[str]) -> list[dict[str, Any]]:
    episodes = [episode for name in tasks for episode in history.evidence.get((kind, name), ())]
    return episodes[:SHOWN]

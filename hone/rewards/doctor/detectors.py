"""Detectors of the environment doctor: each reads the history and names tasks with a defect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hone.rewards.doctor.history import SHOWN, History

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
        about: what the defect is of, where one kind can be of several things, such as one of several time limits.
    """

    kind: str
    what: str
    why: str
    fix: str
    tasks: list[str] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    about: str = ""


def findings(history: History) -> Iterator[Finding]:
    """Yield what all detectors find now."""
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


_FOR_NOTHING = (
    "the policy learns to say nothing, or to break the verifier",
    "give such answers the lowest reward",
)
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

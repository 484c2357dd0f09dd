"""Probes of a verifier in the background: the same answer again, another prompt's answer, an empty one, a traceback."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory, row_of
from hone.errors import HoneError
from hone.rewards.doctor.history import History
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score

log = logging.getLogger(__name__)

TRACEBACK = 'Traceback (most recent call last):\n  File "solution.py", line 1, in <module>\nTimeoutError: timed out'
KINDS = ("repeat", "foreign", "empty", "traceback")
"""Kinds of probes."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Probe:
    """One response to score again.

    Attributes:
        kind: of :data:`KINDS`.
        trajectory: the response, with the text of the probe.
        score: score of the original response.
    """

    kind: str
    trajectory: Trajectory
    score: Score


def probes_of(trajectories: Sequence[Trajectory], scores: Sequence[Score], count: int) -> list[Probe]:
    """Return the probes of up to ``count`` responses, of different tasks; passing ones come first.

    A foreign answer passed on another task, whose ground truth differs: it should not pass here.
    """
    judged = [(t, s) for t, s in zip(trajectories, scores, strict=True) if s.error is None and not t.part]
    judged.sort(key=lambda pair: not pair[1].passes)
    chosen = list({row_of(t.uid): (t, s) for t, s in reversed(judged)}.values())[::-1]
    chosen.sort(key=lambda pair: not pair[1].passes)
    right = [t for t, s in judged if s.passes]
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


def is_hit(probe: Probe, again: Score, best: float | None) -> bool:
    """Return whether a probe shows its defect; ``best`` is the task's highest reward so far."""
    if again.error is not None:
        return False
    if probe.kind == "repeat":
        return (
            abs(again.total - (probe.score.unshaped if probe.score.unshaped is not None else probe.score.total))
            > _ROUNDING
        )
    as_good = again.passes and again.total >= (best or 0.0)
    return as_good and (probe.kind != "foreign" or probe.score.passes)


class Prober:
    """Scores probes in a thread, with worker processes of its own, while the run trains.

    Args:
        config: config block ``reward``.

    Attributes:
        failed: batches of probes that could not be scored.
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
        for probe, again in zip(probes, scores, strict=True):
            task = history.tasks.get(row_of(probe.trajectory.uid))
            hit = is_hit(probe, again, None if task is None else task.best)
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

"""Reward bench: try a reward function or scorer, in a run's workers, on answers of known quality."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hone.config.reward import RewardConfig
from hone.data.episode_log import EpisodeEnd
from hone.data.scored_rows import ScoredRow
from hone.data.types import StopReason, Trajectory
from hone.rewards.manager import RewardManager, logger
from hone.rewards.probes import Probe, after_thoughts, is_agentic, ordinary, traps, with_episodes
from hone.rewards.score import Cause, Score


@dataclass(frozen=True)
class Trial:
    """Probe and its score."""

    probe: Probe
    score: Score


@dataclass
class Bench:
    """Result of a reward bench."""

    trials: list[Trial] = field(default_factory=list)  # all scored probes
    rows: int = 0
    seconds_per_call: float = 0.0  # wall time of a call in its worker, without the first call; 0 for a single call
    stopped: str = ""  # reason why the bench ended early, or empty

    def of_kinds(self, *kinds: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.probe.kind in kinds]

    def totals(self, *kinds: str) -> list[float]:
        return [trial.score.total for trial in self.of_kinds(*kinds) if trial.score.error is None]

    def best(self, kind: str) -> dict[str, float]:
        """Return the best reward of this kind by row, without rows that have none."""
        best: dict[str, float] = {}
        for trial in self.of_kinds(kind):
            if trial.score.error is None:
                uid = trial.probe.sample.uid
                best[uid] = max(best.get(uid, trial.score.total), trial.score.total)
        return best


def run_bench(
    config: RewardConfig,
    rows: Sequence[ScoredRow],
    *,
    adversarial: bool = False,
    seconds: float = float("inf"),
    agentic: bool = False,
) -> Bench:
    """Score probes of every sample.

    Args:
        adversarial: True to add adversarial answers and ground truths of another type.
        seconds: start no further row after this time. A call that times out or ends its process also ends the bench.

        agentic: True if the run plays every row with an agent, whatever the row says.

    Raises:
        RewardError: the function cannot be loaded or called, or a row's data source has no scorer.
    """
    bench = Bench()
    manager = RewardManager(replace(config, max_no_verdict_rate=1.0, max_retries=0))
    begun, calls, busy = time.monotonic(), 0, 0.0
    try:
        for number, row in enumerate(rows):
            probes = [*ordinary(rows, number)]
            probes += after_thoughts(probes)
            if agentic or manager.reads_episodes or is_agentic(row.sample):
                probes = [*with_episodes(rows, number, probes)]
            probes += traps(row) if adversarial else ()
            for batch in (
                [probes[:1], probes[1:]] if number == 0 else [probes]
            ):  # the first call separately: it may never end
                start = time.monotonic()
                bench.trials += _score(manager, batch)
                if bench.trials[0].probe is not batch[0]:
                    calls, busy = calls + len(batch), busy + time.monotonic() - start
                costly = next((trial for trial in bench.trials if _ended_its_process(trial.score)), None)
                if costly is not None:
                    bench.stopped = f"{costly.probe.kind} answer, row {costly.probe.sample.uid}: {costly.score.error}"
                    return bench
            bench.rows += 1
            if time.monotonic() - begun > seconds:
                bench.stopped = f"{bench.rows} of {len(rows)} rows took {time.monotonic() - begun:.1f} s"
                return bench
        return bench
    finally:
        manager.close()
        bench.seconds_per_call = busy / calls * min(config.num_workers, max(1, calls)) if calls else 0.0


def _score(manager: RewardManager, probes: Sequence[Probe]) -> list[Trial]:
    with _quiet(logger):
        scores = asyncio.run(manager.score([_trajectory(probe, index) for index, probe in enumerate(probes)]))
    return [Trial(probe, score) for probe, score in zip(probes, scores, strict=True)]


def _ended_its_process(score: Score) -> bool:
    """Return whether the call cost a worker process; replacing hundreds of them would take minutes."""
    return score.cause in (Cause.TIMEOUT, Cause.CRASH, Cause.MEMORY)


def _trajectory(probe: Probe, index: int) -> Trajectory:
    cut = probe.episode is not None and probe.episode.end is EpisodeEnd.TOKENS
    reason = StopReason.LENGTH if cut else StopReason.STOP
    return Trajectory(
        probe.sample.uid,
        index,
        [],
        [*probe.text.encode()],
        [],
        [],
        [],
        probe.text,
        reason,
        probe.sample,
        episode=probe.episode,
    )


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Disable a logger, since failed calls are expected here and reported by the bench."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before

"""Schedule of a recorded run: its lengths, and the durations that reproduce its steps.

The engine model is fitted in two parts. The seconds of single episodes in a rollout dump give the ratio of the two costs of a decode step.
Its scale is the one with which the simulated engines sample as many tokens a second as the recorded ones while they have requests; or,
for an engine in the trainer's process, the one with which generation takes as long. Lengths are drawn from the dumped episodes, each
independent of its group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median
from typing import Any

import numpy as np

from hone.apps.lab.compare import Run
from hone.apps.lab.schedule.simulation import Schedule, Speed, Turn, simulate
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.threads import divided

MOST_STEPS = 8
"""Simulated steps after the first batches."""
_SCALINGS = 3
_PARALLEL = math.log2(1.5)
"""Work on shared cores is assumed to be 1.5 times as fast on twice the threads."""


@dataclass(frozen=True)
class MeasuredRun:
    """Schedule fitted to a run, with the steps that the fit has not seen."""

    schedule: Schedule
    held_out: tuple[float, ...]  # recorded seconds of each step that is not part of the fit
    cores: SharedCores | None = None  # cores that engines and trainer share; None if they have devices of their own
    # seconds of a pass for old log-probs that the run does without, and asynchronous training needs
    old_log_prob_seconds: float = 0.0

    def scheduled(self, engine_threads: int | None = None, **changes: Any) -> Schedule:
        """Return the run's schedule with changes; durations are those of the cores that engines and trainer then have."""
        schedule = dataclasses.replace(self.schedule, **changes)
        update = schedule.update_seconds + (self.old_log_prob_seconds if schedule.max_staleness else 0.0)
        if self.cores is None:
            return dataclasses.replace(schedule, update_seconds=update)
        then = self.cores
        if engine_threads is not None:
            then = dataclasses.replace(then, engine_threads=engine_threads, training_threads=None)
        (engine, training), (engine_then, training_then) = self.cores.threads(self.schedule), then.threads(schedule)
        return dataclasses.replace(
            schedule,
            speed=schedule.speed.scaled((engine / engine_then) ** _PARALLEL),
            update_seconds=update * (training / training_then) ** _PARALLEL,
        )


@dataclass(frozen=True)
class SharedCores:
    """Cores that the engines and the trainer of one machine share."""

    count: int
    separate: bool  # whether engines have processes of their own, also without asynchrony
    engine_threads: int | None
    training_threads: int | None

    def splits(self, schedule: Schedule) -> list[int | None]:
        """Return threads of each engine that leave training at least one: about 1/4, 1/2 and 3/4 of the cores for all engines.

        None, the only one without asynchrony, keeps the configured threads.
        """
        if not schedule.max_staleness:
            return [None]
        shares = {self.count * quarters // (4 * schedule.replicas) for quarters in (1, 2, 3)}
        return [share for share in sorted(shares) if share and share * schedule.replicas < self.count] or [None]

    def threads(self, schedule: Schedule) -> tuple[int, int]:
        """Return the threads of each engine, and of training."""
        if schedule.max_staleness:
            return divided(self.count, schedule.replicas, self.engine_threads, self.training_threads)
        engine = max(1, self.count // schedule.replicas) if self.separate else self.count
        return engine, self.training_threads or self.count


def measured_run(run: Run) -> MeasuredRun:
    """Fit the schedule of a run to every second of its steps, so that drifts of the run or the machine reach both halves."""
    steps = [row for row in run.metrics if "timing_s/gen" in row]
    steps = [row for row in steps if row.get("timing_s/step", 0) > 0]
    staleness = int(run.config.get("trainer.async_training.max_staleness") or 0)
    first, full = steps[:1], steps[staleness + 1 :]  # the pipeline is full then, and caches are warm
    steps = full if len(full) >= 2 else steps
    if len(steps) < 2:
        raise HoneError(
            f"the run has {len(steps)} timed step{'' if len(steps) == 1 else 's'}",
            where=str(run.path),
            why="half of the steps are for the fit and half for its check",
            fix="train at least 2 steps (trainer.total_training_steps=2), better 10",
        )
    dumps = _dumps(run)
    config = run.config
    batch, n = int(config["data.train_batch_size"]), int(config["actor_rollout_ref.rollout.n"])
    seen, held_out = steps[::2], steps[1::2]
    schedule = Schedule(
        _drawn_from([episode.turns for dump in dumps for episode in dump]),
        _shape(dumps[0], staleness + 1),
        steps=staleness + 1 + MOST_STEPS,
        groups_per_batch=batch,
        n=n,
        max_staleness=staleness,
        partial_rollouts=bool(config.get("trainer.async_training.partial_rollouts")),
        ready_first=config.get("trainer.async_training.order") == "ready_first",
        replicas=int(config.get("actor_rollout_ref.rollout.num_replicas") or 1),
        update_seconds=median(map(_update_seconds, seen)),
        sync_seconds=median(map(_sync_seconds, seen)),
        check_seconds=median(map(_check_seconds, seen)),
    )
    return MeasuredRun(
        _scaled(schedule, seen, first if staleness else seen),
        tuple(row["timing_s/step"] for row in held_out),
        _shared_cores(run),
        _missing_pass(staleness, seen),
    )


# the workload --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Episode:
    turns: tuple[Turn, ...]
    engine_seconds: float

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


def _dumps(run: Run) -> list[list[_Episode]]:
    """Return the episodes of each complete dump; all requests of the first one begin together."""
    archive = open_archive(run.path / "rollouts")
    dumps = [
        [_episode(record) for record in archive.records(step, ["response_mask", "seconds", "episode"])]
        for step in archive.steps()
        if archive.complete(step)
    ]
    dumps = [[episode for episode in dump if episode.tokens] for dump in dumps]
    if not dumps or not dumps[0]:
        raise HoneError(
            "the run has no rollout dump",
            where=str(run.path / "rollouts"),
            why="the schedule depends on the lengths of single responses",
            fix="train with trainer.rollout_dump_freq=1",
        )
    return dumps


def _episode(record: Mapping[str, Any]) -> _Episode:
    spans = [(bool(sampled), len(list(span))) for sampled, span in groupby(record["response_mask"])]
    tool_seconds = float((record["episode"] or {}).get("tool_seconds") or 0.0)
    sampled = [length for sampled, length in spans if sampled]
    tools = sum(not sampled for sampled, _ in spans[1:])
    turns = [Turn(tokens, tool_seconds / tools if place < tools else 0.0) for place, tokens in enumerate(sampled)]
    return _Episode(tuple(turns), max(0.0, float(record["seconds"]) - tool_seconds))


def _drawn_from(episodes: Sequence[tuple[Turn, ...]]) -> Any:
    return lambda generator: generator.choice(episodes)


# durations -----------------------------------------------------------------------------------------------------------


def _sync_seconds(row: Mapping[str, float]) -> float:
    """Return the seconds in which the engines are paused."""
    parts = [row.get(f"timing_s/update_weights_{part}") for part in ("pause", "transfer", "resume")]
    timed = [part for part in parts if part is not None]
    return sum(timed) if timed else row.get("timing_s/update_weights", 0.0)


def _check_seconds(row: Mapping[str, float]) -> float:
    """Return the other seconds of a weight sync, without the wait for responses under way."""
    drain = row.get("timing_s/update_weights_drain", 0.0)
    return max(0.0, row.get("timing_s/update_weights", 0.0) - drain - _sync_seconds(row))


def _missing_pass(staleness: int, seen: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds of a pass for old log-probs, a third of the update's, if the run by turns has none."""
    if staleness or any("timing_s/old_log_prob" in row for row in seen):
        return 0.0
    return median(row.get("timing_s/update_actor", 0.0) for row in seen) / 3


def _shared_cores(run: Run) -> SharedCores | None:
    """Return the cores of a local run without GPUs."""
    hardware, config = run.record.get("hardware") or {}, run.config
    if config.get("trainer.runtime", "local") != "local" or hardware.get("gpus") or not hardware.get("usable_cores"):
        return None
    keys = ("actor_rollout_ref.rollout.num_replicas", "trainer.async_training.engine_threads", "trainer.num_threads")
    replicas, engine, training = (config.get(key) for key in keys)
    return SharedCores(int(hardware["usable_cores"]), replicas is not None, engine, training)


def _update_seconds(row: Mapping[str, float]) -> float:
    """Return the seconds of a step without generation and weight sync, drain included."""
    return max(0.0, row["timing_s/step"] - row["timing_s/gen"] - row.get("timing_s/update_weights", 0.0))


def _shape(episodes: Sequence[_Episode], batches: int) -> Speed:
    """Return the costs of a decode step by least squares over episodes that began together, not negative.

    An episode of l tokens ends after ``step x l + per_request x sum over its tokens of the running requests`` seconds.
    """
    lengths = np.array([episode.tokens for episode in episodes])
    running = np.array([(lengths > token).sum() for token in range(int(lengths.max()))]) * batches
    requests = np.cumsum(running)[lengths - 1]
    seconds = np.array([episode.engine_seconds for episode in episodes])
    step, per_request = np.linalg.lstsq(np.stack([lengths, requests], axis=1), seconds, rcond=None)[0]
    if step <= 0:
        step, per_request = 0.0, float(seconds @ requests / (requests @ requests))
    elif per_request < 0:
        step, per_request = float(seconds @ lengths / (lengths @ lengths)), 0.0
    return Speed(max(float(step), 1e-9), float(per_request))


def _scaled(schedule: Schedule, seen: Sequence[Mapping[str, float]], waited: Sequence[Mapping[str, float]]) -> Schedule:
    """Return the schedule with the engine speed of the recorded steps; in those of ``waited`` the learner waits for a whole batch.

    By turns every step is such a step, and its wait includes what the engine's own throughput does not: clients and tools.
    """
    throughputs = [values for row in seen if (values := _throughputs(row))]
    for _ in range(_SCALINGS):
        if throughputs and schedule.max_staleness:
            steps = simulate(schedule)[schedule.max_staleness :]
            busy = steps[-1].engine_busy - steps[0].engine_busy
            slower = sum(step.tokens for step in steps[1:]) / busy / median(map(mean, throughputs))
        else:
            batches = 1 if schedule.max_staleness else schedule.steps
            steps = simulate(dataclasses.replace(schedule, steps=batches))
            waits = mean(step.batch_complete - step.begun for step in steps)
            slower = median(row["timing_s/gen"] for row in waited) / max(1e-9, waits)
        schedule = dataclasses.replace(schedule, speed=schedule.speed.scaled(slower))
    return schedule


def _throughputs(row: Mapping[str, float]) -> list[float]:
    """Return the tokens of each replica per second in which it has requests."""
    return [value for name, value in row.items() if name.startswith("replica/") and name.endswith("/throughput")]

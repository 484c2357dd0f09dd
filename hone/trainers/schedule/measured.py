"""Schedule of a recorded run: its lengths, and the durations that reproduce its steps.

The engine model is fitted in two parts. The seconds of single episodes in a rollout dump give the ratio of the two costs of a decode step;
its scale is the one with which the simulated generation takes as long as the recorded one. Lengths are drawn from the dumped
episodes, each independent of its group.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median
from typing import Any

import numpy as np

from hone.errors import HoneError
from hone.insight.compare import Run
from hone.trainers.schedule.clock import run as run_virtual
from hone.trainers.schedule.engine import Speed
from hone.trainers.schedule.simulation import Schedule, Simulation
from hone.trainers.schedule.workload import Plan, Turn, Workload

MOST_STEPS = 8
"""Simulated steps after the first batches."""
_SCALINGS = 3


@dataclass(frozen=True)
class MeasuredRun:
    """Schedule fitted to a run, with the steps that the fit has not seen.

    Attributes:
        schedule: the run's schedule.
        held_out: recorded seconds of each step that is not part of the fit.
    """

    schedule: Schedule
    held_out: tuple[float, ...]


def measured_run(run: Run) -> MeasuredRun:
    """Fit the schedule of a run to every second of its steps, so that drifts of the run or the machine reach both halves.

    Raises:
        HoneError: the run has too few steps or no rollout dump.
    """
    steps = [row for row in run.metrics if "timing_s/gen" in row]
    steps = [row for row in steps if row.get("timing_s/step", 0) > 0]
    if len(steps) < 2:
        raise HoneError(
            f"the run has {len(steps)} timed step{'' if len(steps) == 1 else 's'}",
            where=str(run.path),
            why="half of the steps are for the fit and half for its check",
            fix="train at least 2 steps (trainer.total_training_steps=2), better 10",
        )
    episodes = _episodes(run)
    config = run.config
    batch, n = int(config["data.train_batch_size"]), int(config["actor_rollout_ref.rollout.n"])
    staleness = int(config.get("trainer.async_training.max_staleness") or 0)
    seen, held_out = steps[::2], steps[1::2]
    schedule = Schedule(
        Workload(
            _drawn_from([episode.plan for episode in episodes]),
            prompt_tokens=round(mean(row.get("prompt_length/mean", 1) for row in seen)),
        ),
        _shape(episodes, staleness + 1),
        steps=staleness + 1 + MOST_STEPS,
        groups_per_batch=batch,
        n=n,
        rows=max(64, batch),
        max_staleness=staleness,
        partial_rollouts=bool(config.get("trainer.async_training.partial_rollouts")),
        ready_first=config.get("trainer.async_training.order") == "ready_first",
        replicas=int(config.get("actor_rollout_ref.rollout.num_replicas") or 1),
        update_seconds=_constant(median(map(_update_seconds, seen))),
        sync_seconds=median(map(_sync_seconds, seen)),
    )
    # with asynchrony only the first step waits for a whole generation
    generated = steps[0]["timing_s/gen"] if staleness else median(row["timing_s/gen"] for row in seen)
    schedule = _scaled(schedule, generated)
    return MeasuredRun(schedule, tuple(row["timing_s/step"] for row in held_out))


# the workload --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Episode:
    plan: Plan
    engine_seconds: float

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.plan.turns)


def _episodes(run: Run) -> list[_Episode]:
    """Return the episodes of the first dump: all of its requests begin together."""
    dumps = sorted((run.path / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.rpartition("_")[2]))
    lines = dumps[0].read_text(encoding="utf-8").splitlines() if dumps else []
    episodes = [_episode(json.loads(line)) for line in lines]
    episodes = [episode for episode in episodes if episode.tokens]
    if not episodes:
        raise HoneError(
            "the run has no rollout dump",
            where=str(run.path / "rollouts"),
            why="the schedule depends on the lengths of single responses",
            fix="train with trainer.rollout_dump_freq=1",
        )
    return episodes


def _episode(record: Mapping[str, Any]) -> _Episode:
    spans = [(bool(sampled), len(list(span))) for sampled, span in groupby(record["response_mask"])]
    tool_seconds = float((record.get("episode") or {}).get("tool_seconds") or 0.0)
    turns = [length for sampled, length in spans if sampled]
    given = [length for sampled, length in spans[1:] if not sampled]
    waits = tool_seconds / max(1, len(given))
    plan = Plan(
        tuple(
            Turn(tokens, waits if place < len(given) else 0.0, given[place] if place < len(given) else 0)
            for place, tokens in enumerate(turns)
        )
    )
    return _Episode(plan, max(0.0, float(record["seconds"]) - tool_seconds))


def _drawn_from(plans: Sequence[Plan]) -> Any:
    def draw(generator: random.Random) -> Plan:
        return generator.choice(plans)

    return draw


# durations -----------------------------------------------------------------------------------------------------------


def _constant(seconds: float) -> Any:
    return lambda tokens: seconds


def _sync_seconds(row: Mapping[str, float]) -> float:
    parts = [row.get(f"timing_s/update_weights_{part}") for part in ("pause", "transfer", "resume")]
    timed = [part for part in parts if part is not None]
    return sum(timed) if timed else row.get("timing_s/update_weights", 0.0)


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


def _scaled(schedule: Schedule, generated: float) -> Schedule:
    """Return the schedule whose first generation takes the recorded seconds."""
    for _ in range(_SCALINGS):
        simulated = simulate(dataclasses.replace(schedule, steps=1)).steps[0]
        scale = generated / max(1e-9, simulated.batch_complete - simulated.begun)
        speed = schedule.speed
        speed = dataclasses.replace(speed, step=speed.step * scale, per_request=speed.per_request * scale)
        schedule = dataclasses.replace(schedule, speed=speed)
    return schedule


def simulate(schedule: Schedule) -> Simulation:
    """Run a schedule on virtual time."""
    made: list[Simulation] = []

    async def whole() -> None:
        made.append(Simulation(schedule))
        await made[0].run()

    run_virtual(whole())
    return made[0]

"""Steps of a recorded run under other schedules, for ``hone plan --schedule``: simulated from event to event.

The learner's turn: wait for a batch -> update -> (wait for the groups under way, unless partial rollouts) -> weight sync -> free the
slots. Which groups are admitted and trained is decided by the :class:`~hone.trainers.rollouter.GroupBuffer` of a real run. Tests
compare with rollouter, player and engine client on virtual time. The schedule is fitted to the recorded run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import groupby
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from hone.apps.lab.compare import Run
from hone.data.types import Sample
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.threads import divided
from hone.trainers.rollouter import GroupBuffer


@dataclass(frozen=True)
class Speed:
    """Speed of an engine: a decode step of r requests takes ``step + per_request x r`` seconds."""

    step: float
    per_request: float = 0.0

    def scaled(self, slower: float) -> Speed:
        """Return the speed of an engine that takes ``slower`` times as long."""
        return Speed(self.step * slower, self.per_request * slower)

    def seconds(self, running: int) -> float:
        return self.step + self.per_request * running


class Turn(NamedTuple):
    """Sampled tokens of a turn, and the seconds of the tool that answers it."""

    tokens: int
    tool_seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Parameters of a simulated run."""

    draw: Callable[[random.Random], tuple[Turn, ...]]  # draws the turns of an episode
    speed: Speed
    steps: int = 4
    groups_per_batch: int = 4
    n: int = 2
    max_staleness: int = 0
    partial_rollouts: bool = False
    ready_first: bool = False
    replicas: int = 1
    update_seconds: float = 1.0
    sync_seconds: float = 0.0  # of a weight sync in which the engines are paused
    check_seconds: float = 0.0  # for which the learner then waits
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """A step of the learner: times in seconds, in order; trained tokens, and their mean age in weight updates."""

    begun: float
    batch_complete: float
    updated: float
    published: float
    engine_busy: float  # seconds with requests so far, summed over replicas
    tokens: int
    staleness: float


@dataclass(eq=False)
class _Episode:
    group: int
    turns: list[Turn]
    tokens: int
    since: float = 0.0
    """Tokens of its replica at its beginning, or at the last weight sync."""
    versions: float = 0.0
    """Sum of the versions that sampled its tokens."""


@dataclass(eq=False)
class _Replica:
    """An engine, all of whose requests advance equally: ``tokens`` counts what each of them has got up to the time ``at``."""

    tokens: float = 0.0
    at: float = 0.0
    busy: float = 0.0
    load: int = 0
    changes: int = 0
    requests: list[tuple[float, int, _Episode]] = field(default_factory=list)


class _Run:
    """State of a simulation."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.time, self.paused, self.version = schedule, 0.0, False, 0
        self.buffer = GroupBuffer(schedule.groups_per_batch, schedule.max_staleness, ready_first=schedule.ready_first)
        self._replicas = [_Replica() for _ in range(schedule.replicas)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._uids = itertools.count(), itertools.count()
        self._groups: dict[int, list[_Episode]] = {}
        self._under_way: dict[int, int] = {}
        self._random = random.Random(schedule.seed)

    def step(self) -> Step:
        """Take the learner's turn."""
        schedule, begun = self.schedule, self.time
        for _ in range(self.buffer.free_slots):
            self._admit(next(self._uids))
        while not self.buffer.ready:
            self._next_event()
        groups = [self._groups.pop(int(group.uid)) for group in self.buffer.take()]
        episodes, complete, version = [one for group in groups for one in group], self.time, self.version
        self._sleep(schedule.update_seconds)
        updated = self.time
        while self._under_way and not schedule.partial_rollouts:
            self._next_event()
        self._pause(True)
        self._sleep(schedule.sync_seconds)
        self.version += 1
        self._pause(False)
        self._sleep(schedule.check_seconds)
        self.buffer.release(self.version)
        for replica in self._replicas:
            self._advance(replica)
        tokens = sum(one.tokens for one in episodes)
        age = version - sum(one.versions for one in episodes) / tokens
        busy = sum(replica.busy for replica in self._replicas)
        return Step(begun, complete, updated, self.time, busy, tokens, max(0.0, age))

    def _admit(self, group: int) -> None:
        self.buffer.admit([str(group)])
        drawn = [self.schedule.draw(self._random) for _ in range(self.schedule.n)]
        self._groups[group] = [_Episode(group, list(turns), sum(turn.tokens for turn in turns)) for turns in drawn]
        self._under_way[group] = len(drawn)
        for episode in self._groups[group]:
            self._request(episode)

    # events ----------------------------------------------------------------------------------------------------------

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def _next_event(self) -> None:
        self.time, _, event = heappop(self._events)
        event()

    def _sleep(self, seconds: float) -> None:
        end = self.time + seconds
        while self._events and self._events[0][0] <= end:
            self._next_event()
        self.time = end

    # the engines -----------------------------------------------------------------------------------------------------

    def _request(self, episode: _Episode) -> None:
        """Send the next turn of an episode to the replica with the fewest outstanding tokens."""
        replica = min(self._replicas, key=lambda one: one.load)
        self._advance(replica)
        tokens, episode.since = episode.turns[0].tokens, replica.tokens
        replica.load += tokens
        heappush(replica.requests, (replica.tokens + tokens, next(self._numbers), episode))
        self._plan(replica)

    def _advance(self, replica: _Replica) -> None:
        if replica.requests and not self.paused:
            seconds = self.time - replica.at
            replica.busy += seconds
            replica.tokens += seconds / self.schedule.speed.seconds(len(replica.requests))
        replica.at = self.time

    def _plan(self, replica: _Replica) -> None:
        """Plan the end of the first request; an earlier plan is void."""
        replica.changes += 1
        if replica.requests and not self.paused:
            left = max(0.0, replica.requests[0][0] - replica.tokens)
            end = self.time + left * self.schedule.speed.seconds(len(replica.requests))
            self._at(end, partial(self._answer, replica, replica.changes))

    def _answer(self, replica: _Replica, changes: int) -> None:
        if changes != replica.changes:
            return
        self._advance(replica)
        end, _, episode = heappop(replica.requests)
        self._plan(replica)
        episode.versions += self.version * (end - episode.since)
        turn = episode.turns.pop(0)
        replica.load -= turn.tokens
        if episode.turns:
            self._at(self.time + turn.tool_seconds, partial(self._request, episode))
        else:
            self._at(self.time + turn.tool_seconds, partial(self._end, episode.group))

    def _end(self, group: int) -> None:
        self._under_way[group] -= 1
        if not self._under_way[group]:
            del self._under_way[group]
            nothing: Any = None
            self.buffer.put(Sample(uid=str(group), prompt_ids=[], messages=None, data_source=""), nothing)

    def _pause(self, paused: bool) -> None:
        """Stop or resume decoding; a request under way has tokens of both versions."""
        for replica in self._replicas:
            self._advance(replica)
        self.paused = paused
        for replica in self._replicas:
            self._plan(replica)
            for _, _, episode in replica.requests if paused else ():
                episode.versions += self.version * (replica.tokens - episode.since)
                episode.since = replica.tokens


def simulate(schedule: Schedule) -> list[Step]:
    run = _Run(schedule)
    return [run.step() for _ in range(schedule.steps)]


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
class _Recorded:
    turns: tuple[Turn, ...]
    engine_seconds: float

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


def _dumps(run: Run) -> list[list[_Recorded]]:
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


def _episode(record: Mapping[str, Any]) -> _Recorded:
    spans = [(bool(sampled), len(list(span))) for sampled, span in groupby(record["response_mask"])]
    tool_seconds = float((record["episode"] or {}).get("tool_seconds") or 0.0)
    sampled = [length for sampled, length in spans if sampled]
    tools = sum(not sampled for sampled, _ in spans[1:])
    turns = [Turn(tokens, tool_seconds / tools if place < tools else 0.0) for place, tokens in enumerate(sampled)]
    return _Recorded(tuple(turns), max(0.0, float(record["seconds"]) - tool_seconds))


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


def _shape(episodes: Sequence[_Recorded], batches: int) -> Speed:
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


@dataclass(frozen=True)
class Forecast:
    """Prediction for one schedule, after its first batches; idle times are shares, staleness is that of the mean token."""

    name: str
    replicas: int
    step_seconds: float
    engine_idle: float
    trainer_idle: float
    staleness: float
    tokens_per_second: float
    # of each engine where it shares cores with the trainer; of several splits the fastest
    engine_threads: int | None = None


def forecast(schedule: Schedule, name: str = "") -> Forecast:
    """Simulate a schedule and measure it from the moment at which its pipeline is full."""
    steps = simulate(schedule)[schedule.max_staleness :]
    first, last = steps[0], steps[-1]
    counted, elapsed = steps[1:], last.published - first.published
    busy = last.engine_busy - first.engine_busy
    return Forecast(
        name,
        schedule.replicas,
        elapsed / len(counted),
        1 - busy / (schedule.replicas * elapsed),
        1 - sum(step.updated - step.batch_complete for step in counted) / elapsed,
        mean(step.staleness for step in counted),
        sum(step.tokens for step in counted) / elapsed,
    )


def alternatives(run: MeasuredRun) -> list[Forecast]:
    """Return forecasts for synchronous and asynchronous training, on devices of their own also with twice the replicas."""
    made, schedule = [], run.schedule
    for replicas in (schedule.replicas,) if run.cores else (schedule.replicas, 2 * schedule.replicas):
        for staleness, partly in ((0, False), (1, False), (1, True), (2, False), (2, True)):
            name = f"staleness {staleness}{', partial' if partly else ''}" if staleness else "synchronous"
            steps = schedule.steps - schedule.max_staleness + staleness
            changes = {"max_staleness": staleness, "partial_rollouts": partly, "replicas": replicas, "steps": steps}
            splits = run.cores.splits(run.scheduled(**changes)) if run.cores else [None]
            ways = [
                replace(forecast(run.scheduled(threads, **changes), name), engine_threads=threads) for threads in splits
            ]
            made.append(min(ways, key=lambda one: one.step_seconds))
    return made


def back_test(run: MeasuredRun) -> tuple[float, float]:
    """Return the predicted and the recorded median seconds of a step that the fit has not seen."""
    return forecast(run.schedule).step_seconds, median(run.held_out)


def table(forecasts: list[Forecast]) -> Table:
    names = ("schedule", "replicas", "step s", "engine idle", "trainer idle", "staleness", "tokens/s")
    threads = any(one.engine_threads for one in forecasts)
    shown = Table()
    for name in (*names, *(["engine_threads"] if threads else [])):
        shown.add_column(name, no_wrap=name == "schedule")
    for one in forecasts:
        cells = (f"{one.step_seconds:.3g}", f"{one.engine_idle:.0%}", f"{one.trainer_idle:.0%}", f"{one.staleness:.2f}")
        shown.add_row(
            *(one.name, str(one.replicas), *cells, f"{one.tokens_per_second:.4g}"),
            *([str(one.engine_threads or "")] if threads else []),
        )
    return shown

"""Simulation of a schedule: its learner takes turns with time, its engines go from event to event.

The learner's turn: wait for a batch -> update -> (wait for the groups under way, unless partial rollouts) -> weight sync -> free the
slots. Which groups are admitted and trained is decided by the :class:`~hone.trainers.group_buffer.GroupBuffer` of a real run. Tests
compare with rollouter, player and engine client on virtual time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from hone.data.types import Sample
from hone.trainers.group_buffer import GroupBuffer


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

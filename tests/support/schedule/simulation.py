"""Simulation of one run: its learner, rollouter, buffer, player and engine client on virtual time.

The learner's turn is that of :class:`~hone.trainers.rl.RLTrainer`:

    next_batch -> update -> publish (drain unless partial_rollouts -> weight sync -> free the slots)
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.schedule.engine import SimulatedEngine, Speed
from support.schedule.workload import SimulatedContext, Workload

from hone.agents.player import Player
from hone.cluster.handles import GroupMeans, concat_batches
from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.algorithm import FilterGroupsConfig
from hone.data.batch import Batch, is_broken
from hone.data.prompts import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import SamplingParams
from hone.insight.coverage import CoverageLedger
from hone.insight.run_files import StepLines
from hone.trainers.group_filter import GroupFilter
from hone.trainers.rollouter import Group, GroupBuffer, Rollouter

LOOP = "support.schedule.workload:PlannedLoop"
UNLIMITED = 2**40


@dataclass(frozen=True)
class Loss:
    """Loss of a replica: its number, the time, and the seconds until it is back, which may be infinite."""

    replica: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Parameters of a simulated run.

    Attributes:
        workload: episodes.
        speed: speed of a replica.
        steps: steps of the run.
        groups_per_batch: prompts per step.
        n: episodes per prompt.
        rows: rows of the dataset.
        max_staleness, partial_rollouts, ready_first: keys of ``trainer.async_training``.
        replicas: engine replicas.
        update_seconds: function of a batch's tokens that returns the seconds of its update.
        sync_seconds: seconds of a weight sync in which the engines are paused.
        check_seconds: seconds in which the learner then waits for answers under the new weights.
        max_gen_batches: batches that dynamic sampling may try for a step; None: no dynamic sampling.
        max_no_verdict_rate: share of a step's groups that may be replaced because an episode failed; None: a failed episode ends the run.
        losses: losses of replicas.
        seed: of the run.
    """

    workload: Workload
    speed: Speed
    steps: int = 4
    groups_per_batch: int = 4
    n: int = 2
    rows: int = 64
    max_staleness: int = 0
    partial_rollouts: bool = False
    ready_first: bool = False
    replicas: int = 1
    update_seconds: Callable[[int], float] = lambda _: 1.0
    sync_seconds: float = 0.0
    check_seconds: float = 0.0
    max_gen_batches: int | None = None
    max_no_verdict_rate: float | None = None
    losses: tuple[Loss, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One step of the simulated learner; times are virtual seconds.

    Attributes:
        begun, batch_complete, updated, drained, published: times of the learner's turn, in order.
        engine_busy: seconds with requests so far, summed over replicas.
        version: version of the weights that the step trains.
        groups: uid of each group with its version at admission.
        trajectories: trained trajectories.
    """

    begun: float
    batch_complete: float
    updated: float
    drained: float
    published: float
    engine_busy: float
    version: int
    groups: tuple[tuple[str, int], ...]
    trajectories: tuple[Trajectory, ...] = field(repr=False)

    @property
    def tokens(self) -> int:
        """Sampled tokens that the step trains on."""
        return sum(sum(trajectory.response_mask) for trajectory in self.trajectories)

    @property
    def staleness(self) -> float:
        """Mean age of its tokens in weight updates."""
        ages = [
            self.version - version
            for trajectory in self.trajectories
            for version, sampled in zip(trajectory.token_versions, trajectory.response_mask, strict=True)
            if sampled
        ]
        return sum(ages) / max(1, len(ages))


class RecordedBuffer(GroupBuffer):
    """Buffer that records the events of its groups.

    Attributes:
        events: name of the event and uid, in order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[str, str]] = []

    def admit(self, uids: Sequence[str]) -> None:
        """Record the admissions."""
        super().admit(uids)
        self.events += [("admitted", uid) for uid in uids]

    def evict(self, uid: str) -> None:
        """Record an eviction."""
        super().evict(uid)
        self.events.append(("evicted", uid))

    def take(self) -> list[Group]:
        """Record the groups of the batch."""
        groups = super().take()
        self.events += [("trained", group.uid) for group in groups]
        return groups

    def withdraw(self, uid: str) -> None:
        """Record that a group of the batch is replaced instead of trained on."""
        super().withdraw(uid)
        latest = max(index for index, event in enumerate(self.events) if event == ("trained", uid))
        self.events[latest] = "evicted", uid

    def take_part(self, count: int) -> list[Group]:
        """Record the groups of a part of the batch."""
        groups = super().take_part(count)
        self.events += [("trained", group.uid) for group in groups]
        return groups


class Simulation:
    """One simulated run.

    Args:
        schedule: parameters.
        state: state of an earlier simulation of the same schedule, to resume from.

    Attributes:
        engine: the simulated engine.
        buffer: buffer with its events.
        steps: completed steps.
        saved: state after the last step.
    """

    def __init__(self, schedule: Schedule, state: dict[str, Any] | None = None) -> None:
        self.schedule = schedule
        self.engine = SimulatedEngine(schedule.speed, schedule.replicas)
        self.buffer = RecordedBuffer(
            schedule.groups_per_batch, schedule.max_staleness, ready_first=schedule.ready_first
        )
        prompt = [0] * schedule.workload.prompt_tokens
        dataset: Any = [
            Sample(uid=str(row), prompt_ids=prompt, messages=None, data_source="simulated", agent_name=LOOP)
            for row in range(schedule.rows)
        ]
        self.sampler = EpochSampler(schedule.rows, schedule.groups_per_batch, shuffle=True, seed=schedule.seed)
        self.steps: list[Step] = []
        self._player = self._make_player()
        self._drained = 0.0
        asynchronous = schedule.max_staleness > 0
        self.rollouter = Rollouter(
            dataset,
            self.sampler,
            self._play,
            self.buffer,
            CoverageLedger(StepLines(Path())),
            n=schedule.n,
            seed=schedule.seed,
            means=self._means,
            too_few_in=self._too_few_in,
            max_no_verdict_rate=schedule.max_no_verdict_rate or 0.0,
            group_filter=self._group_filter(),
            score=self._score if asynchronous else None,
            partial_rollouts=schedule.partial_rollouts,
        )
        self._step = 0
        self.saved = self._state()
        if state is not None:
            self._load_state(state)

    def _make_player(self) -> Player:
        on_error = "stop" if self.schedule.max_no_verdict_rate is None else "drop"
        several, agent = MultiTurnConfig(enable=True), AgentConfig(on_error=on_error, max_retries=0)
        tokenizer: Any = _NoText()
        return Player(self.engine, SimulatedContext(tokenizer, several, agent, workload=self.schedule.workload))

    def _group_filter(self) -> GroupFilter | None:
        schedule = self.schedule
        if schedule.max_gen_batches is None:
            return None
        config = FilterGroupsConfig(True, None, schedule.max_gen_batches)
        return GroupFilter(config, self._score, self._values_of, schedule.groups_per_batch)

    # the rollout -----------------------------------------------------------------------------------------------------

    async def _play(self, samples: Sequence[Sample], seeding: tuple[Any, ...]) -> Batch:
        def seed_of(uid: str, index: int) -> int:
            return derive_seed(*seeding, uid, index)

        sampling = SamplingParams(max_tokens=UNLIMITED)
        played = await self._player.play(samples, sampling, n=self.schedule.n, seed_of=seed_of)
        return Batch({"uid": [one.uid for one in played], "trajectory": played})

    async def _score(self, batch: Any) -> Any:
        seconds = [
            self.schedule.workload.score_seconds(self._generator("score", uid)) for uid in dict.fromkeys(batch.uids)
        ]
        await asyncio.sleep(max(seconds))
        return batch

    async def _values_of(self, batch: Any, metric: str | None) -> tuple[list[float | None], None]:
        useful = {uid: self.schedule.workload.useful(self._generator("useful", uid)) for uid in batch.uids}
        self.buffer.events += [("useless", uid) for uid, differs in useful.items() if not differs]
        return [float(useful[uid] and row) for row, uid in enumerate(batch.uids)], None

    def _generator(self, purpose: str, uid: str) -> random.Random:
        return random.Random(derive_seed(self.schedule.seed, purpose, uid, self.buffer.version))

    async def _means(self, batch: Any) -> dict[str, GroupMeans]:
        tokens: dict[str, list[int]] = {}
        for one in batch.objects("trajectory"):
            tokens.setdefault(one.uid, []).append(sum(one.response_mask))
        return {uid: GroupMeans(None, sum(lengths) / len(lengths)) for uid, lengths in tokens.items()}

    async def _too_few_in(self, batch: Any) -> list[str]:
        return list(dict.fromkeys(one.uid for one in batch.objects("trajectory") if is_broken(one)))

    # the learner -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train all steps, then cancel the groups under way."""
        learner = asyncio.current_task()
        assert learner is not None
        learner.set_name("learner")
        for loss in self.schedule.losses:
            loop = asyncio.get_running_loop()
            loop.call_at(loss.at, self.engine.lose, loss.replica)
            if math.isfinite(loss.seconds):
                loop.call_at(loss.at + loss.seconds, self.engine.restore, loss.replica)
        while self._step < self.schedule.steps:
            self._step += 1
            await self._turn()
            self.saved = self._state()
        await self.rollouter.close()

    async def _turn(self) -> None:
        time = asyncio.get_running_loop().time
        begun = time()
        groups = await self.rollouter.next_batch(self._step)
        if self.schedule.max_staleness == 0 and self.rollouter.group_filter is None:
            groups = await self._scored(groups)
        batch: Any = concat_batches([group.batch for group in groups])
        complete, version = time(), self.buffer.version
        trajectories = tuple(batch.objects("trajectory"))
        await asyncio.sleep(self.schedule.update_seconds(sum(len(one.response_ids) for one in trajectories)))
        updated = time()
        await self.rollouter.publish(self._step, self._sync, await self._means(batch))
        admitted = tuple((group.uid, group.version) for group in groups)
        times = (begun, complete, updated, self._drained, time())
        self.steps.append(Step(*times, self.engine.busy, version, admitted, trajectories))

    async def _scored(self, groups: list[Group]) -> list[Group]:
        """Score the groups of a batch by turns, replacing those with too few verdicts."""
        scored = await self._score(concat_batches([group.batch for group in groups]))
        while replaced := await self.rollouter.replace(scored, self._step):
            dropped, added = replaced
            groups = [group for group in groups if group.uid not in dropped] + added
            scored = await self._score(concat_batches([group.batch for group in added]))
        return groups

    async def _sync(self) -> None:
        self._drained = asyncio.get_running_loop().time()
        await self._player.client.interrupt()
        await self.engine.pause()
        await asyncio.sleep(self.schedule.sync_seconds)
        await self.engine.load_weights([], self._step)
        await self.engine.resume()
        self._player.client.proceed()
        await asyncio.sleep(self.schedule.check_seconds)

    # state -----------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        finished = {group.uid: group.batch for group in self.rollouter.finished_groups()}
        state = {"step": self._step, "sampler": self.sampler.state_dict(), "rollouter": self.rollouter.state_dict()}
        return {**state, "finished": finished, "events": list(self.buffer.events)}

    def _load_state(self, state: dict[str, Any]) -> None:
        self._step = self.engine.version = state["step"]
        self.sampler.load_state_dict(state["sampler"])
        self.buffer.release(self._step)
        self.rollouter.load_state_dict(
            state["rollouter"], lambda samples: Batch.concat([state["finished"][uid] for uid in samples])
        )
        self.buffer.events = list(state["events"])
        self.saved = state


class _NoText:
    """Tokenizer of episodes without text."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""

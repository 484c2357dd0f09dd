"""Rollouter: draw prompts, play their episodes, and store finished groups in the buffer, which bounds the staleness of trained groups.

    Rollouter --groups--> GroupBuffer --ready batch--> Learner --weights v+1--> engines
       ^  admits a prompt group only while a slot is free                |
       +----------------- slots released after the weight update <-------+

A group holds a slot from its admission until the weight update that trains on it. There are ``(max_staleness + 1) x
groups_per_batch`` slots, so at most ``max_staleness`` updates happen between a group's admission and its training. With bound 0,
rollout and learner alternate strictly: synchronous training.

Two ways of one rollouter. Taking turns (:meth:`Rollouter.next_batch`), the free slots are filled and played as one call, while the
learner waits. During training (:meth:`Rollouter.begin`), every group is a task:

    task           waits for                                   is resumed by
    group          an engine and its tools, then its score     the engine, the reward workers
    learner        a complete batch (``next_batch``)           the group that completes it, or the first error
    weight sync    groups under way (``publish``)              the last of them; with partial rollouts it does not wait
                   validation of the present weights           its last answer, or the first error
    validation     its share of the engines                    an answer; when no group is under way, the share is lifted
    admission      a free slot, and no weight sync             ``begin`` after the weight update, an evicted group
    checkpoint     nothing: it saves finished groups, and the identity of those under way

Nobody waits for a slot while holding one, and only groups hold slots; so a batch completes whenever the engines answer.
Validation waits only for engines, and holds no slot.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.cluster.handles import AnyBatch, GroupMeans, rows_of
from hone.data.prompts import EpochSampler, PromptDataset
from hone.data.types import Sample, row_of
from hone.errors import RewardError
from hone.insight import activity
from hone.insight.coverage import EQUAL_ANSWERS, NO_VERDICT, QUARANTINED, CoverageLedger, Stage
from hone.trainers.group_filter import GroupFilter
from hone.trainers.validator import ValidationTask


@dataclass(frozen=True)
class Group:
    """Group of all episodes of one prompt.

    Attributes:
        sample: row of the prompt.
        version: weight version at admission.
        batch: one row per episode, or references to rows on a cluster.
    """

    sample: Sample
    version: int
    batch: AnyBatch

    @property
    def uid(self) -> str:
        """Uid of the prompt."""
        return self.sample.uid


class GroupBuffer:
    """Buffer that admits prompt groups, collects finished ones, and returns batches.

    In order of admission, early batches are not biased to short responses and runs are reproducible. With ``ready_first`` a batch has
    the groups that must be in it so that no later batch exceeds the bound, then those that finished first.

    Args:
        groups_per_batch: prompts per step.
        max_staleness: weight updates allowed between a group's admission and its training.
        ready_first: take finished groups before those that were admitted earlier.
    """

    def __init__(self, groups_per_batch: int, max_staleness: int = 0, *, ready_first: bool = False) -> None:
        if groups_per_batch < 1 or max_staleness < 0:
            raise ValueError("groups_per_batch must be at least 1 and max_staleness at least 0")
        self.groups_per_batch, self.max_staleness, self.ready_first = groups_per_batch, max_staleness, ready_first
        self.version = 0
        """Version of the current weights."""
        self._waiting: dict[str, None] = {}  # in order of admission
        self._admitted_at: dict[str, int] = {}
        self._finished: dict[str, Group] = {}  # in order of completion
        self._training: list[str] = []

    @property
    def free_slots(self) -> int:
        """Number of groups that can be admitted now."""
        used = len(self._waiting) + len(self._training)
        return (self.max_staleness + 1) * self.groups_per_batch - used

    @property
    def waiting(self) -> int:
        """Number of admitted groups that are not taken yet."""
        return len(self._waiting)

    def __contains__(self, uid: object) -> bool:
        return uid in self._admitted_at

    @property
    def playing(self) -> list[str]:
        """Uids of admitted groups that have not finished, in order of admission."""
        return [uid for uid in self._waiting if uid not in self._finished]

    @property
    def ready(self) -> bool:
        """True if the next batch is complete."""
        head = self._next()
        return not self._training and len(head) == self.groups_per_batch and all(uid in self._finished for uid in head)

    def _next(self) -> list[str]:
        """Return the uids of the next batch; in part if it is not complete."""
        if not self.ready_first:
            return list(self._waiting)[: self.groups_per_batch]
        unfinished = [uid for uid in self._waiting if uid not in self._finished]
        by_readiness, batch = [*self._finished, *unfinished], dict[str, None]()
        for later in range(self.max_staleness + 1):  # the next `later` batches have space for as many of these groups
            oldest = self.version + later - self.max_staleness
            due = {uid for uid in self._waiting if self._admitted_at[uid] <= oldest}
            missing = len(due) - later * self.groups_per_batch - len(due & batch.keys())
            candidates = [uid for uid in by_readiness if uid in due and uid not in batch]
            batch |= dict.fromkeys(candidates[: max(0, missing)])
        return [*batch, *(uid for uid in self._finished if uid not in batch)][: self.groups_per_batch]

    def admit(self, uids: Sequence[str]) -> None:
        """Give each group a slot.

        Raises:
            ValueError: not enough free slots, or a uid is already in the buffer; then none is admitted.
        """
        if len(uids) > self.free_slots:
            raise ValueError(f"{len(uids)} groups for {self.free_slots} free slots")
        duplicates = [uid for index, uid in enumerate(uids) if uid in self._admitted_at or uid in uids[:index]]
        if duplicates:
            raise ValueError(f"group '{duplicates[0]}' is already in the buffer")
        for uid in uids:
            self._waiting[uid] = None
            self._admitted_at[uid] = self.version

    def put(self, sample: Sample, batch: AnyBatch) -> Group:
        """Store the finished group of a prompt.

        Raises:
            KeyError: the group was not admitted.
            ValueError: the group has already finished.
        """
        uid = sample.uid
        if uid not in self._admitted_at:
            raise KeyError(f"group '{uid}' was not admitted")
        if uid in self._finished or uid in self._training:
            raise ValueError(f"group '{uid}' has already finished")
        self._finished[uid] = Group(sample, self._admitted_at[uid], batch)
        return self._finished[uid]

    def evict(self, uid: str) -> None:
        """Remove a finished group and free its slot.

        Raises:
            KeyError: there is no finished group with this uid.
        """
        if uid not in self._finished:
            raise KeyError(f"group '{uid}' is not a finished group of the buffer")
        del self._finished[uid], self._admitted_at[uid], self._waiting[uid]

    def take(self) -> list[Group]:
        """Return the next batch; its slots stay occupied until :meth:`release`.

        Raises:
            RuntimeError: no batch is ready.
        """
        if not self.ready:
            raise RuntimeError("no batch is ready")
        self._training = self._next()
        for uid in self._training:
            del self._waiting[uid]
        return [self._finished.pop(uid) for uid in self._training]

    def withdraw(self, uid: str) -> None:
        """Remove a group from the taken batch and free its slot.

        Raises:
            KeyError: the group is not in the taken batch.
        """
        if uid not in self._training:
            raise KeyError(f"group '{uid}' is not in the taken batch")
        self._training.remove(uid)
        del self._admitted_at[uid]

    def part_ready(self, count: int) -> bool:
        """Return whether the first ``count`` groups that are not taken yet have finished (``ready_first``: any of them)."""
        return len(self._part(count)) == count

    def take_part(self, count: int) -> list[Group]:
        """Return ``count`` groups of the next batch before it is complete.

        Raises:
            RuntimeError: they are not ready.
        """
        part = self._part(count)
        if len(part) < count:
            raise RuntimeError(f"{len(part)} of {count} groups are ready")
        self._training += part
        for uid in part:
            del self._waiting[uid]
        return [self._finished.pop(uid) for uid in part]

    def _part(self, count: int) -> list[str]:
        candidates = self._finished if self.ready_first else list(self._waiting)[:count]
        return [uid for uid in candidates if uid in self._finished][:count]

    def staleness(self, group: Group) -> int:
        """Return the number of weight updates since the group was admitted."""
        return self.version - group.version

    def release(self, version: int) -> None:
        """Free the slots of the taken batch after the weight update to ``version``."""
        self.version = version
        for uid in self._training:
            del self._admitted_at[uid]
        self._training = []

    def open_groups(self) -> list[tuple[str, int, Group | None]]:
        """Return uid, version at admission and finished group (or None) of every group to train, in order of admission."""
        return [(uid, self._admitted_at[uid], self._finished.get(uid)) for uid in self._waiting]

    def readmit(self, uid: str, version: int) -> None:
        """Admit a group of a resumed run, as of the given version.

        Raises:
            ValueError: see :meth:`admit`.
        """
        self.admit([uid])
        self._admitted_at[uid] = version


Play = Callable[[Sequence[Sample], tuple[Any, ...]], Awaitable[AnyBatch]]
"""Function of (samples, seeding) that returns a batch of n episodes per sample, in order."""
Score = Callable[[AnyBatch], Awaitable[AnyBatch]]
"""Function that returns a batch with its scores, and reports them to the sampler."""


class Rollouter:
    """Producer of complete groups: draws prompts while the buffer has slots, and plays their episodes.

    Args:
        ledger: record of the fate of every prompt that is drawn.
        means: function of a batch that returns means of each group, for the ledger.
        seed: run seed; every response draws from (seed, step, row, index).
        group_filter: filter that selects finished groups to replace by new prompts; None keeps all.
        too_few_in: function that returns the groups of a scored batch with too few verdicts, which are replaced by new prompts.
        max_no_verdict_rate: largest share of a step's groups that may be replaced this way. Asynchronous rollout may finish more groups
            in a step than a batch has; then it is a share of those.
        score: function that scores finished groups in asynchronous training.
        quarantine: uids of rows that are drawn and left out.
        partial_rollouts: let new weights interrupt the groups under way instead of waiting for them.
        leave_out: receives the rows and the fate of groups that are replaced, for the rollout archive.

    Attributes:
        dropped: number of groups replaced in this step because they had too few verdicts.
        validation: validation during training, for which new weights wait; None without.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        sampler: EpochSampler,
        play: Play,
        buffer: GroupBuffer,
        ledger: CoverageLedger,
        *,
        n: int,
        seed: int,
        means: Callable[[AnyBatch], Awaitable[dict[str, GroupMeans]]],
        too_few_in: Callable[[AnyBatch], Awaitable[list[str]]],
        max_no_verdict_rate: float,
        group_filter: GroupFilter | None = None,
        score: Score | None = None,
        quarantine: Collection[str] = (),
        partial_rollouts: bool = False,
        leave_out: Callable[[AnyBatch, str], None] | None = None,
    ) -> None:
        self.dataset, self.sampler, self.play, self.buffer = dataset, sampler, play, buffer
        self.ledger, self._means, self._partial_rollouts = ledger, means, partial_rollouts
        self.n, self.seed, self._quarantine = n, seed, frozenset(quarantine)
        self.group_filter, self._too_few_in, self._max_no_verdict_rate = group_filter, too_few_in, max_no_verdict_rate
        self.dropped = self._judged = 0
        self._score = score
        self.validation: ValidationTask | None = None
        self._leave_out = leave_out or (lambda rows, fate: None)
        self._row_of: dict[str, int] = {}  # row of each uid, filled on first use
        self._drawn: deque[tuple[int, int]] = deque()  # row and draw of the ledger, not played yet
        self._training: list[Group] = []
        self._draws: Counter[str] = Counter()  # prompts drawn since the last weight update
        self._seeding_of: dict[str, tuple[Any, ...]] = {}  # of the groups under way
        self._restored: list[Sample] = []  # under way at the checkpoint, and not started again yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._held = False
        self._left: int | None = None

    async def next_batch(self, step: int) -> list[Group]:
        """Return the next batch, whose groups are played now or were played during training.

        Raises:
            ConfigError: too many groups without learning signal had to be replaced.
            RewardError: too many groups had too few verdicts.
        """
        self._begin_step()
        if self._score is None:
            await self._play_batch(step)
        else:
            self.begin()
            with activity.waiting(f"groups of step {step}", on=["rollout"]):
                await self._until(lambda: self.buffer.ready)
        self._training = self.buffer.take()
        return self._training

    def _begin_step(self) -> None:
        self.dropped = self._judged = 0
        if self.group_filter:
            self.group_filter.begin()

    async def _play_batch(self, step: int) -> None:
        self._draws.clear()
        while True:
            samples = self._draw(self.buffer.free_slots)
            self.buffer.admit([sample.uid for sample in samples])
            await self._produce(samples, (self.seed, "rollout", step))
            if self.buffer.ready:
                return
            if self.group_filter is not None:
                self.group_filter.check_budget()

    async def parts(self, size: int) -> AsyncIterator[list[Group]]:
        """Yield the groups of the next batch as they finish, at most ``size`` at a time.

        Raises:
            HoneError: see :meth:`next_batch`.
        """
        self._begin_step()
        self.begin()
        self._training = []
        while missing := self.buffer.groups_per_batch - len(self._training):
            count = min(size, missing)
            with activity.waiting("groups of the batch", on=["rollout"]):
                await self._until(lambda count=count: self.buffer.part_ready(count))
            groups = self.buffer.take_part(count)
            self._training += groups
            yield groups

    # during training -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Admit prompts to all free slots and start their groups; admit none while :meth:`publish` waits."""
        restored, self._restored = self._restored, []
        for sample in restored:
            self._start(sample, self._seeding_of[sample.uid])
        while not self._held and self.buffer.free_slots and not self._enough:
            (sample,) = self._draw(1)
            self.buffer.admit([sample.uid])
            self._start(sample, (self.seed, "rollout", self.buffer.version + 1))

    @property
    def _enough(self) -> bool:
        """True if the waiting groups are all that the rest of the run trains on."""
        return self._left is not None and self.buffer.waiting >= self._left * self.buffer.groups_per_batch

    def _start(self, sample: Sample, seeding: tuple[Any, ...]) -> None:
        self._seeding_of[sample.uid] = seeding
        task = asyncio.get_running_loop().create_task(self._group(sample, seeding), name=f"group {sample.uid}")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._group_ended())

    def _group_ended(self) -> None:
        self._changed.set()
        if self.validation is not None and self.is_idle:
            self.validation.lift()

    @property
    def is_idle(self) -> bool:
        """True if no group is under way. In asynchronous training none begins then before the next weight update."""
        return all(task.done() for task in self._tasks)

    async def begin_validation(self, step: int) -> None:
        """Begin the validation of the present weights; those of the next update wait until it has ended."""
        assert self.validation is not None
        await self.validation.begin(step, on_end=self._changed.set)
        self.begin()
        if self.is_idle:
            self.validation.lift()

    async def _group(self, sample: Sample, seeding: tuple[Any, ...]) -> None:
        await self._produce([sample], seeding)
        del self._seeding_of[sample.uid]
        if self.group_filter is not None and self.buffer.free_slots:
            self.group_filter.check_budget()
        self.begin()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; raise the error of a group that has failed."""
        while True:
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()
            if condition():
                return
            self._changed.clear()
            await self._changed.wait()

    async def publish(
        self,
        version: int,
        sync: Callable[[], Awaitable[None]],
        means: Mapping[str, GroupMeans],
        *,
        left: int | None = None,
    ) -> None:
        """Send the weights of the update to ``version``, and free the slots of the groups that it trained on.

        Args:
            version: version of the new weights.
            sync: function that sends them. In asynchronous training it is called when no group is under way, or with
                ``partial_rollouts`` at once.
            means: means of the trained groups.
            left: batches that are still to be trained; no groups begin for later ones. None: no end is known.
        """
        if self._score is not None and not self._partial_rollouts:
            self._held = True
            with activity.waiting("groups under way, before new weights", on=["rollout"]):
                await self._until(lambda: not self._tasks)
        await self.end_validation()
        await sync()
        for group in self._training:
            draw = self.ledger.admitted(group.uid)
            self.ledger.trained(draw, self.buffer.staleness(group), *means[group.uid])
        self._training = []
        self.buffer.release(version)
        self._draws.clear()
        self._held = False
        self._left = left
        if self._score is not None:
            self.begin()

    async def end_validation(self) -> None:
        """Wait until the validation under way has ended, if there is one.

        Raises:
            HoneError: it failed, or a group did meanwhile.
        """
        validation = self.validation
        if validation is not None and validation.step is not None:
            with activity.waiting(f"validation of step {validation.step}, before new weights", on=["rollout"]):
                await self._until(lambda: validation.has_ended)
            validation.collect()

    async def close(self) -> None:
        """Cancel the groups under way. Validation continues, with all of the engines."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # a group ---------------------------------------------------------------------------------------------------------

    async def _produce(self, samples: Sequence[Sample], seeding: tuple[Any, ...]) -> None:
        """Play prompts, and store their groups in the buffer; those without use free their slots."""
        batch, evicted = await self.play(samples, seeding), []
        if self.group_filter is not None:
            batch, evicted = await self.group_filter.judge(batch)
            if self.sampler.learns:
                self.report(*self.group_filter.judged)
        elif self._score is not None:
            batch = await self._score(batch)
        dropped = await self._too_few(batch) if self.group_filter is not None or self._score is not None else []
        rows = rows_of(batch.uids)
        means = await self._means(batch) if evicted or dropped else {}
        for sample in samples:
            self.buffer.put(sample, batch.reorder(rows[sample.uid]))
            self.ledger.finish(self.ledger.admitted(sample.uid))
        for uid in dropped:
            self.buffer.evict(uid)
            self.ledger.failed(self.ledger.admitted(uid), NO_VERDICT, *means[uid])
            self._leave_out(batch.reorder(rows[uid]), "failed")
        for uid in [uid for uid in evicted if uid not in dropped]:
            self.buffer.evict(uid)
            self.ledger.filtered(self.ledger.admitted(uid), EQUAL_ANSWERS, *means[uid])
            self._leave_out(batch.reorder(rows[uid]), "filtered")

    async def replace(self, batch: AnyBatch, step: int) -> tuple[list[str], list[Group]] | None:
        """Replace the groups of the taken batch that have too few verdicts; the new ones are not scored yet.

        Args:
            batch: scored groups of the taken batch.

        Returns:
            Uids of the replaced groups, and the new groups; None if no group had to be replaced.

        Raises:
            RewardError: too many groups had too few verdicts.
        """
        dropped = await self._too_few(batch)
        if not dropped:
            return None
        means = await self._means(batch)
        for uid in dropped:
            self.buffer.withdraw(uid)
            self.ledger.failed(self.ledger.admitted(uid), NO_VERDICT, *means[uid])
        samples = self._draw(len(dropped))
        self.buffer.admit([sample.uid for sample in samples])
        await self._produce(samples, (self.seed, "rollout", step))
        groups = self.buffer.take_part(len(samples))
        self._training = [group for group in self._training if group.uid not in dropped] + groups
        return dropped, groups

    async def _too_few(self, batch: AnyBatch) -> list[str]:
        """Return the groups of a scored batch with too few verdicts, and count them.

        Raises:
            RewardError: too many groups had too few verdicts.
        """
        dropped = await self._too_few_in(batch)
        self.dropped += len(dropped)
        self._judged += len(set(batch.uids)) - len(dropped)
        if self.dropped > self._max_no_verdict_rate * max(self.buffer.groups_per_batch, self._judged):
            raise RewardError(
                f"{self.dropped} groups had too few responses with a verdict in one step of {self.buffer.groups_per_batch} groups",
                why=f"reward.max_no_verdict_rate={self._max_no_verdict_rate:g} of a step's groups may be replaced; beyond that the rest "
                "would be a biased selection of easy prompts",
                fix="fix the cause (the log has each error), or raise reward.max_no_verdict_rate",
                where="reward.max_no_verdict_rate",
            )
        return dropped

    def report(self, uids: Sequence[str], rewards: Sequence[float]) -> None:
        """Report the mean reward of each row, clamped to 0..1, to the sampler."""
        if not self._row_of:
            self._row_of = {self.dataset[row].uid: row for row in range(len(self.dataset))}
        rewards_by_row: dict[int, list[float]] = {}
        for uid, reward in zip(uids, rewards, strict=True):
            row = self._row_of[row_of(uid)]
            rewards_by_row.setdefault(row, []).append(min(1.0, max(0.0, reward)))
        self.sampler.observe({row: sum(values) / len(values) for row, values in rewards_by_row.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of every group in the buffer, and the ledger, which has the rows of all open draws."""
        groups = [
            {"uid": uid, "version": version, "seeding": None if group is not None else self._seeding_of[uid]}
            for uid, version, group in self.buffer.open_groups()
        ]
        return {"ledger": self.ledger.state_dict(), "draws": dict(self._draws), "groups": groups}

    def finished_groups(self) -> list[Group]:
        """Return the finished groups of the buffer, in order of admission."""
        return [group for _, _, group in self.buffer.open_groups() if group is not None]

    def load_state_dict(self, state: dict[str, Any], finished: Callable[[dict[str, Sample]], AnyBatch]) -> None:
        """Restore :meth:`state_dict` into an empty buffer at the resumed version.

        Args:
            state: saved state. Groups that were under way are played again with their seeds, under the current weights.
            finished: function that returns the finished groups as one batch, given their samples by uid.
        """
        self.ledger.load_state_dict(state["ledger"])
        draws = self.ledger.open_draws()
        self._drawn = deque((draw.row, draw.draw) for draw in draws if draw.stage is Stage.WAITING)
        self._draws, groups = Counter(state["draws"]), state["groups"]
        samples = {draw.uid: self._sample(draw.row, draw.uid) for draw in draws if draw.stage is not Stage.WAITING}
        done = {group["uid"]: samples[group["uid"]] for group in groups if group["seeding"] is None}
        for group in groups:
            uid = group["uid"]
            self.buffer.readmit(uid, group["version"] if uid in done else self.buffer.version)
            if uid not in done:
                self._seeding_of[uid] = tuple(group["seeding"])
                self._restored.append(samples[uid])
        if done:
            batch = finished(done)
            for uid, rows in rows_of(batch.uids).items():
                self.buffer.put(samples[uid], batch.reorder(rows))

    def _sample(self, row: int, uid: str) -> Sample:
        sample = self.dataset[row]
        return sample if sample.uid == uid else dataclasses.replace(sample, uid=uid)

    def _left_out(self, row: int, draw: int) -> bool:
        """Record the fate of a draw in quarantine; return whether it is one."""
        sample = self.dataset[row]
        if sample.uid not in self._quarantine:
            return False
        self.ledger.admit(draw, f"{sample.uid}~quarantine{draw}", sample.data_source, len(sample.prompt_ids))
        self.ledger.filtered(draw, QUARANTINED)
        return True

    def _draw(self, count: int) -> list[Sample]:
        """Return the next ``count`` prompts. A repeated prompt between two updates is a separate group with its random streams."""
        while len(self._drawn) < count:
            for row in self.sampler.next_batch():
                draw = self.ledger.draw(row, self.sampler.epoch)
                if not self._left_out(row, draw):
                    self._drawn.append((row, draw))
        samples = []
        for _ in range(count):
            row, draw = self._drawn.popleft()
            name, uid = self.dataset[row].uid, ""
            while not uid or uid in self.buffer:
                self._draws[name] += 1
                uid = name if self._draws[name] == 1 else f"{name}~{self._draws[name]}"
            sample = self._sample(row, uid)
            self.ledger.admit(draw, uid, sample.data_source, len(sample.prompt_ids))
            samples.append(sample)
        return samples

"""Draws prompts, has their episodes played, and brings finished groups to the buffer."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hone.cluster.runtime import AnyBatch
from hone.data.prompts import PromptDataset
from hone.data.sampler import EpochSampler
from hone.data.types import Sample
from hone.errors import EpisodeError
from hone.trainers.group_buffer import Group, GroupBuffer
from hone.trainers.group_filter import GroupFilter

Play = Callable[[Sequence[Sample], tuple[Any, ...]], Awaitable[AnyBatch]]
"""(samples, what the draws depend on) to a batch of n episodes a sample, in the order of the samples."""


class Rollouter:
    """Draws prompts while the buffer has slots, plays their episodes, and delivers whole groups.

    Args:
        dataset: prompts.
        sampler: which rows come next.
        play: plays the episodes.
        n: responses a prompt.
        seed: run seed; every response draws from (seed, step, row, index).
        group_filter: decides which finished groups are replaced by new prompts; None keeps all.
        broken_in: names the groups of a batch that have an episode that failed; they are replaced by new prompts. None where a
            failed episode ends the run.
        max_error_rate: largest share of a step's groups that may be replaced so.

    Attributes:
        dropped: groups replaced in this step because an episode failed.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        sampler: EpochSampler,
        play: Play,
        buffer: GroupBuffer,
        *,
        n: int,
        seed: int,
        group_filter: GroupFilter | None = None,
        broken_in: Callable[[AnyBatch], Awaitable[list[str]]] | None = None,
        max_error_rate: float = 0.0,
    ) -> None:
        self.dataset, self.sampler, self.play, self.buffer = dataset, sampler, play, buffer
        self.n, self.seed = n, seed
        self.group_filter, self.broken_in, self.max_error_rate = group_filter, broken_in, max_error_rate
        self.dropped = 0
        self._row_of: dict[str, int] = {}  # of each uid, once it is asked for
        self._rows: deque[int] = deque()  # drawn from the sampler, and not asked yet

    async def next_batch(self, step: int) -> list[Group]:
        """Fill the free slots and generate, until a batch is complete, and return it.

        Raises:
            ConfigError: too many groups taught nothing and had to be replaced.
            EpisodeError: too many groups had an episode that failed.
        """
        asked: Counter[str] = Counter()
        self.dropped = 0
        if self.group_filter:
            self.group_filter.begin()
        while True:
            samples = self._draw(self.buffer.free_slots, asked)
            self.buffer.admit([sample.uid for sample in samples])
            batch = await self._without_broken(samples, await self.play(samples, (self.seed, "rollout", step)))
            samples, useless = [sample for sample in samples if sample.uid in set(batch.uids)], []
            if self.group_filter is not None and samples:
                batch, useless = await self.group_filter.judge(batch)
                if self.sampler.learns:
                    self.report(*self.group_filter.judged)
            rows = rows_by_uid(batch.uids)
            for sample in samples:
                self.buffer.put(sample, batch.reorder(rows[sample.uid]))
            for uid in useless:
                self.buffer.evict(uid)
            if self.buffer.ready:
                return self.buffer.take()
            if self.group_filter is not None:
                self.group_filter.check_budget(self.buffer.free_slots)

    async def _without_broken(self, samples: Sequence[Sample], batch: AnyBatch) -> AnyBatch:
        """The batch without the groups of episodes that failed; these give their slots to the next prompts."""
        broken = set(await self.broken_in(batch)) if self.broken_in is not None else set()
        if not broken:
            return batch
        self.dropped += len(broken)
        if self.dropped > self.max_error_rate * self.buffer.groups_per_batch:
            raise EpisodeError(
                f"{self.dropped} groups had an episode that broke, in one step of {self.buffer.groups_per_batch} groups",
                why=f"agent.max_error_rate={self.max_error_rate:g} of a step's groups may be replaced; what is left would be a "
                "selection of the easy ones",
                fix="mend what breaks them (the log has each error), or raise actor_rollout_ref.rollout.agent.max_error_rate",
                where="actor_rollout_ref.rollout.agent",
            )
        rows = rows_by_uid(batch.uids)
        for sample in samples:
            if sample.uid in broken:
                self.buffer.put(sample, batch.reorder(rows[sample.uid]))
                self.buffer.evict(sample.uid)
        return batch.reorder([row for uid, own in rows.items() if uid not in broken for row in own])

    def report(self, uids: Sequence[str], rewards: Sequence[float]) -> None:
        """Tell the sampler how well the rows of a batch were answered: the mean reward of each, cut to 0..1."""
        if not self._row_of:
            self._row_of = {self.dataset[row].uid: row for row in range(len(self.dataset))}
        found: dict[int, list[float]] = {}
        for uid, reward in zip(uids, rewards, strict=True):
            row = self._row_of.get(uid)  # none for a row asked again within its step
            row = self._row_of[uid.rpartition("~")[0]] if row is None else row
            found.setdefault(row, []).append(min(1.0, max(0.0, reward)))
        self.sampler.observe({row: sum(values) / len(values) for row, values in found.items()})

    def state_dict(self) -> dict[str, Any]:
        """Rows drawn and not asked yet."""
        return {"rows": list(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the rows of :meth:`state_dict`."""
        self._rows = deque(state["rows"])

    def _draw(self, count: int, asked: Counter[str]) -> list[Sample]:
        """The next ``count`` prompts. One that comes again within a step is a group of its own, with draws of its own."""
        while len(self._rows) < count:
            self._rows.extend(self.sampler.next_batch())
        samples = []
        for _ in range(count):
            sample = self.dataset[self._rows.popleft()]
            asked[sample.uid] += 1
            again = asked[sample.uid]
            samples.append(sample if again == 1 else dataclasses.replace(sample, uid=f"{sample.uid}~{again}"))
        return samples


def rows_by_uid(uids: Sequence[str]) -> dict[str, list[int]]:
    """The rows of each group, groups in the order in which they come first: an episode may leave several rows."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    return rows

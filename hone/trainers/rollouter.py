"""Rollouter: draw prompts, play their episodes, and store finished groups in the buffer."""

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
"""Function of (samples, seeding) that returns a batch of n episodes per sample, in order."""


class Rollouter:
    """Producer of complete groups: draws prompts while the buffer has slots, and plays their episodes.

    Args:
        dataset: dataset of prompts.
        sampler: sampler of dataset rows.
        play: function that plays the episodes.
        n: responses per prompt.
        seed: run seed; every response draws from (seed, step, row, index).
        group_filter: filter that selects finished groups to replace by new prompts; None keeps all.
        broken_in: function that returns the groups of a batch with a failed episode, which are replaced by new prompts. None if a
            failed episode ends the run.
        max_error_rate: largest share of a step's groups that may be replaced this way.

    Attributes:
        dropped: number of groups replaced in this step because of a failed episode.
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
        self._row_of: dict[str, int] = {}  # row of each uid, filled on first use
        self._rows: deque[int] = deque()  # drawn from the sampler and not played yet

    async def next_batch(self, step: int) -> list[Group]:
        """Fill the free slots and generate until a batch is complete; return it.

        Raises:
            ConfigError: too many groups without learning signal had to be replaced.
            EpisodeError: too many groups had a failed episode.
        """
        draws: Counter[str] = Counter()
        self.dropped = 0
        if self.group_filter:
            self.group_filter.begin()
        while True:
            samples = self._draw(self.buffer.free_slots, draws)
            self.buffer.admit([sample.uid for sample in samples])
            batch = await self._without_broken(samples, await self.play(samples, (self.seed, "rollout", step)))
            samples, evicted = [sample for sample in samples if sample.uid in set(batch.uids)], []
            if self.group_filter is not None and samples:
                batch, evicted = await self.group_filter.judge(batch)
                if self.sampler.learns:
                    self.report(*self.group_filter.judged)
            rows = rows_by_uid(batch.uids)
            for sample in samples:
                self.buffer.put(sample, batch.reorder(rows[sample.uid]))
            for uid in evicted:
                self.buffer.evict(uid)
            if self.buffer.ready:
                return self.buffer.take()
            if self.group_filter is not None:
                self.group_filter.check_budget(self.buffer.free_slots)

    async def _without_broken(self, samples: Sequence[Sample], batch: AnyBatch) -> AnyBatch:
        """Remove groups with failed episodes from a batch and free their slots for the next prompts."""
        broken = set(await self.broken_in(batch)) if self.broken_in is not None else set()
        if not broken:
            return batch
        self.dropped += len(broken)
        if self.dropped > self.max_error_rate * self.buffer.groups_per_batch:
            raise EpisodeError(
                f"{self.dropped} groups had a failed episode in one step of {self.buffer.groups_per_batch} groups",
                why=f"agent.max_error_rate={self.max_error_rate:g} of a step's groups may be replaced; beyond that the rest would be a "
                "biased selection of easy prompts",
                fix="fix the cause (the log has each error), or raise actor_rollout_ref.rollout.agent.max_error_rate",
                where="actor_rollout_ref.rollout.agent",
            )
        rows = rows_by_uid(batch.uids)
        for sample in samples:
            if sample.uid in broken:
                self.buffer.put(sample, batch.reorder(rows[sample.uid]))
                self.buffer.evict(sample.uid)
        return batch.reorder([row for uid, group_rows in rows.items() if uid not in broken for row in group_rows])

    def report(self, uids: Sequence[str], rewards: Sequence[float]) -> None:
        """Report the mean reward of each row, clamped to 0..1, to the sampler."""
        if not self._row_of:
            self._row_of = {self.dataset[row].uid: row for row in range(len(self.dataset))}
        rewards_by_row: dict[int, list[float]] = {}
        for uid, reward in zip(uids, rewards, strict=True):
            row = self._row_of.get(uid)  # None for a row drawn again within its step
            row = self._row_of[uid.rpartition("~")[0]] if row is None else row
            rewards_by_row.setdefault(row, []).append(min(1.0, max(0.0, reward)))
        self.sampler.observe({row: sum(values) / len(values) for row, values in rewards_by_row.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that were drawn and not played yet."""
        return {"rows": list(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows of :meth:`state_dict`."""
        self._rows = deque(state["rows"])

    def _draw(self, count: int, draws: Counter[str]) -> list[Sample]:
        """Return the next ``count`` prompts. A repeated prompt within a step is a separate group with its random streams."""
        while len(self._rows) < count:
            self._rows.extend(self.sampler.next_batch())
        samples = []
        for _ in range(count):
            sample = self.dataset[self._rows.popleft()]
            draws[sample.uid] += 1
            repetition = draws[sample.uid]
            samples.append(sample if repetition == 1 else dataclasses.replace(sample, uid=f"{sample.uid}~{repetition}"))
        return samples


def rows_by_uid(uids: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows of each group, in order of first occurrence; an episode may have several rows."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    return rows

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
from hone.trainers.group_buffer import Group, GroupBuffer
from hone.trainers.group_filter import GroupFilter

Play = Callable[[Sequence[Sample], tuple[Any, ...]], Awaitable[AnyBatch]]
"""(samples, what the draws depend on) to a batch of n rows a sample, in the order of the samples."""


class Rollouter:
    """Draws prompts while the buffer has slots, plays their episodes, and delivers whole groups.

    Args:
        dataset: prompts.
        sampler: which rows come next.
        play: plays the episodes.
        n: responses a prompt.
        seed: run seed; every response draws from (seed, step, row, index).
        group_filter: decides which finished groups are replaced by new prompts; None keeps all.
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
    ) -> None:
        self.dataset, self.sampler, self.play, self.buffer = dataset, sampler, play, buffer
        self.n, self.seed = n, seed
        self.group_filter = group_filter
        self._row_of: dict[str, int] = {}  # of each uid, once it is asked for
        self._rows: deque[int] = deque()  # drawn from the sampler, and not asked yet

    async def next_batch(self, step: int) -> list[Group]:
        """Fill the free slots and generate, until a batch is complete, and return it.

        Raises:
            ConfigError: too many groups had to be replaced.
        """
        asked: Counter[str] = Counter()
        if self.group_filter:
            self.group_filter.begin()
        while True:
            samples = self._draw(self.buffer.free_slots, asked)
            self.buffer.admit([sample.uid for sample in samples])
            batch, useless = await self.play(samples, (self.seed, "rollout", step)), []
            if self.group_filter is not None:
                batch, useless = await self.group_filter.judge(batch)
                if self.sampler.learns:
                    self.report(*self.group_filter.judged)
            for number, sample in enumerate(samples):
                self.buffer.put(sample, batch.slice(number * self.n, (number + 1) * self.n))
            if self.group_filter is None:
                return self.buffer.take()
            for uid in useless:
                self.buffer.evict(uid)
            if self.buffer.ready:
                return self.buffer.take()
            self.group_filter.check_budget(self.buffer.free_slots)

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

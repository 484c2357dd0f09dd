"""Feeds prompts to the engine and finished groups to the buffer."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents import single_turn
from hone.data.prompts import PromptDataset
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import Engine, SamplingParams
from hone.trainers.group_buffer import Group, GroupBuffer
from hone.trainers.group_filter import GroupFilter


class Rollouter:
    """Draws prompts while the buffer has slots, plays their episodes, and delivers whole groups.

    Args:
        dataset: prompts.
        sampler: which rows come next.
        engine: generates.
        sampling: how.
        n: responses a prompt.
        seed: run seed; every response draws from (seed, step, row, index).
        group_filter: decides which finished groups are replaced by new prompts; None keeps all.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        sampler: EpochSampler,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        buffer: GroupBuffer,
        sampling: SamplingParams,
        *,
        n: int,
        seed: int,
        group_filter: GroupFilter | None = None,
    ) -> None:
        self.dataset, self.sampler, self.engine, self.tokenizer = dataset, sampler, engine, tokenizer
        self.buffer, self.sampling, self.n, self.seed = buffer, sampling, n, seed
        self.group_filter = group_filter
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
            finished = [self.buffer.put(uid, group) async for uid, group in self._groups(samples, step)]
            if self.group_filter is None:
                return self.buffer.take()
            for uid in await self.group_filter.useless(finished):
                self.buffer.evict(uid)
            if self.buffer.ready:
                return self.buffer.take()
            self.group_filter.check_budget(self.buffer.free_slots)

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

    async def _groups(self, samples: list[Sample], step: int) -> AsyncIterator[tuple[str, list[Trajectory]]]:
        partial: dict[str, list[Trajectory]] = {}

        def seed_of(uid: str, index: int) -> int:
            return derive_seed(self.seed, "rollout", step, uid, index)

        episodes = single_turn.play(samples, self.engine, self.tokenizer, self.sampling, n=self.n, seed_of=seed_of)
        async for trajectory in episodes:
            group = partial.setdefault(trajectory.uid, [])
            group.append(trajectory)
            if len(group) == self.n:
                yield trajectory.uid, partial.pop(trajectory.uid)

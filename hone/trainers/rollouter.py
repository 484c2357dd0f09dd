"""Feeds prompts to the engine and finished groups to the buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from transformers import PreTrainedTokenizerBase

from hone.agents import single_turn
from hone.data.prompts import PromptDataset
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import Engine, SamplingParams
from hone.trainers.group_buffer import Group, GroupBuffer


class Rollouter:
    """Draws prompts while the buffer has slots, plays their episodes, and delivers whole groups.

    Args:
        dataset: prompts.
        sampler: which rows come next.
        engine: generates.
        sampling: how.
        n: responses a prompt.
        seed: run seed; every response draws from (seed, step, row, index).
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
    ) -> None:
        self.dataset, self.sampler, self.engine, self.tokenizer = dataset, sampler, engine, tokenizer
        self.buffer, self.sampling, self.n, self.seed = buffer, sampling, n, seed

    async def next_batch(self, step: int) -> list[Group]:
        """Fill the free slots, generate until a batch is complete, and return it."""
        samples: list[Sample] = []
        while self.buffer.free_slots - len(samples) >= self.buffer.groups_per_batch:
            samples += [self.dataset[row] for row in self.sampler.next_batch()]
        self.buffer.admit([sample.uid for sample in samples])
        async for uid, group in self._groups(samples, step):
            self.buffer.put(uid, group)
        return self.buffer.take()

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

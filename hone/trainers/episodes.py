"""Episodes of a run: played by the rollout role, scored by the reward model and the batch ops."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hone.cluster.any_batch import AnyBatch
from hone.cluster.runtime import Roles
from hone.config.rollout import RolloutConfig
from hone.data.types import Sample
from hone.generation import is_served
from hone.generation.protocol import SamplingParams


class Episodes:
    """Playing and scoring of episodes by the roles of a run."""

    def __init__(self, roles: Roles) -> None:
        self.rollout, self.work, self._reward_model = roles.rollout, roles.work, roles.reward_model
        self._under_way: Counter[int] = Counter()  # groups by rollout worker

    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> AnyBatch:
        """Play every sample ``n`` times; rows are in the order of the samples. ``seeding`` determines the random streams."""
        return await self.rollout.play(samples, sampling, n=n, seeding=seeding)

    async def play_during_training(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> AnyBatch:
        """Play like :meth:`play`, within the share of the engines' requests that :meth:`limit_validation` has set."""
        return await self.rollout.play_during_training(samples, sampling, n=n, seeding=seeding)

    async def limit_validation(self, share: float | None) -> None:
        """Set the share of the engines' requests that validation during training may take; None means no limit."""
        await self.rollout.limit_validation(share)

    async def play_group(
        self, sample: Sample, sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> AnyBatch:
        """Play one sample ``n`` times in the rollout worker with the fewest groups under way."""
        worker = min(range(self.rollout.dp_size), key=self._under_way.__getitem__)
        self._under_way[worker] += 1
        try:
            return await self.rollout.play_here(worker, [sample], sampling, n=n, seeding=seeding)
        finally:
            self._under_way[worker] -= 1

    async def score(self, batch: AnyBatch, *, training: bool = True) -> AnyBatch:
        """Add the reward model's scores and the final scores; in training, with the length penalty."""
        if self._reward_model is not None:
            batch = batch.updated(await self._reward_model.score(batch))
        return batch.updated(await self.work.score(batch, training=training))

    async def engine_metrics(self, keys: RolloutConfig) -> dict[str, float]:
        """Return the metrics of engines that have some of their own: served ones, and those that draft."""
        if is_served(keys) or keys.speculative.method is not None:
            return await self.rollout.take_engine_metrics()
        return {}

    async def answer_greedily(self, samples: Sequence[Sample], sampling: SamplingParams) -> AnyBatch:
        """Return the scored greedy answer to every prompt, with the training limits on length and stop strings.

        A greedy answer has the most likely token of the full distribution at every position.
        """
        prompts = list({sample.uid: sample for sample in samples}.values())
        greedy = dataclasses.replace(sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, report_support=False)
        return await self.score(await self.play(prompts, greedy, n=1, seeding=(0,)))

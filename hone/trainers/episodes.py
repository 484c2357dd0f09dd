"""Episodes of a run: played by the rollout role, scored by the reward model and the reward function, wherever they live."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hone.cluster.runtime import AnyBatch, Group
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams


class Episodes:
    """Plays and scores.

    Args:
        rollout: plays.
        work: holds the reward function.
        judge: the reward model, or None.
    """

    def __init__(self, rollout: Group, work: Group, judge: Group | None) -> None:
        self.rollout, self.work, self.judge = rollout, work, judge

    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> AnyBatch:
        """Ask every sample ``n`` times; rows are in the order of the samples. ``seeding`` is what the draws depend on."""
        return await self.rollout.play(samples, sampling, n=n, seeding=seeding)

    async def score(self, batch: AnyBatch, *, training: bool = True) -> AnyBatch:
        """Add the scores: the reward model's, and those that count, in training with the punishment of length."""
        if self.judge is not None:
            batch = batch.updated(await self.judge.score(batch))
        return batch.updated(await self.work.score(batch, training=training))

    async def answer_greedily(self, samples: Sequence[Sample], sampling: SamplingParams) -> AnyBatch:
        """The scored greedy answer to every prompt, under the training limits on length and stop strings.

        A greedy answer is the likeliest token at every place, of the whole distribution.
        """
        prompts = list({sample.uid: sample for sample in samples}.values())
        greedy = dataclasses.replace(sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
        return await self.score(await self.play(prompts, greedy, n=1, seeding=(0,)))


def joined(parts: Sequence[AnyBatch]) -> AnyBatch:
    """The rows of all parts, in order."""
    kind: Any = type(parts[0])
    return kind.concat(parts)

"""Publication: the actor's new weights reach every engine, and a canary proves that they did."""

from __future__ import annotations

import dataclasses

from hone.cluster.rollout import Weights
from hone.cluster.runtime import AnyBatch, Group
from hone.config.tree import RLConfig
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams

BUCKET_BYTES = 512 * 2**20
"""Weights on their way at a time."""
CANARY_TOKENS = 8


class Publisher:
    """Takes weights from the actor to the engines.

    While an engine reads the actor's own parameters there is nothing to take, and every batch is compared with the trainer
    anyway. Otherwise the engines have copies. Those beside the actor gather its parts in their own process; to those apart weights go
    bucket by bucket, through the object store: the memory that the processes of a node share, copied once to every other
    node. Then every engine answers a fixed prompt, and the trainer says how likely it finds the answer.

    Attributes:
        copies: whether engines hold weights of their own.

    Args:
        config: of the run.
        actor: gives the weights.
        rollout: takes them.
        prompt: of the canary.
    """

    def __init__(self, config: RLConfig, actor: Group, rollout: Group, prompt: Sample) -> None:
        self.actor, self.rollout = actor, rollout
        self._source: Weights = rollout.source().result()
        self.copies = self._source is not Weights.OWN
        self._prompts = [dataclasses.replace(prompt, uid=f"canary {number}") for number in range(rollout.dp_size)]
        self._sampling = SamplingParams(
            max_tokens=CANARY_TOKENS, temperature=config.actor_rollout_ref.rollout.temperature, ignore_eos=True
        )

    async def publish(self, version: int) -> AnyBatch | None:
        """Hand the weights over as ``version``.

        Returns:
            Where engines hold copies, what each answered to the canary prompt, with the engine's ``rollout_log_probs`` and
            the trainer's ``log_probs``; else None.
        """
        if not self.copies:
            await self.rollout.load_weights([], version)
            return None
        if self._source is Weights.GATHERED:
            await self.rollout.gather_weights(version)
        else:
            await self._send(version)
        played = await self.rollout.play(self._prompts, self._sampling, n=1, seeding=(0, "canary"))
        return played.updated(await self.actor.log_probs(played))

    async def _send(self, version: int) -> None:
        await self.actor.export_weights()
        bucket = await self.actor.next_weights(BUCKET_BYTES)
        while bucket is not None:
            await self.rollout.load_weights(bucket, version)
            bucket = await self.actor.next_weights(BUCKET_BYTES)

"""Publication: the actor's new weights reach every engine, and a canary proves that they did."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from hone.cluster.rollout import Weights
from hone.cluster.runtime import AnyBatch, Group
from hone.config.tree import RLConfig
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams

CANARY_TOKENS = 8
PARTS = ("prepare", "pause", "transfer", "resume")
"""Of a publication: putting whole weights together, stopping engines, handing over, going on."""


class Publisher:
    """Takes weights from the actor to the engines.

    While an engine reads the actor's own parameters there is nothing to take, and every batch is compared with the trainer
    anyway. Otherwise the engines have copies. Those beside the actor gather its parts in their own process; to those apart weights go
    bucket by bucket, through the object store: the memory that the processes of a node share, copied once to every other
    node; and into an engine's own process by one of :mod:`hone.generation.remote.transports`. An engine serves nothing between
    the first bucket and the last. Then every engine answers a fixed prompt, and the trainer says how likely it finds the answer.

    Attributes:
        copies: whether engines hold weights of their own.
        seconds: of the parts of the last publication (prepare, pause, transfer, resume); empty where nothing is copied.

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
        self.seconds: dict[str, float] = {}
        keys = config.actor_rollout_ref.rollout
        self._bucket_bytes = keys.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        engines = rollout.dp_size * rollout.replicas().result()
        self._prompts = [dataclasses.replace(prompt, uid=f"canary {number}") for number in range(engines)]
        self._sampling = SamplingParams(max_tokens=CANARY_TOKENS, temperature=keys.temperature, ignore_eos=True)

    async def publish(self, version: int) -> AnyBatch | None:
        """Hand the weights over as ``version``.

        Returns:
            Where engines hold copies, what each answered to the canary prompt, with the engine's ``rollout_log_probs`` and
            the trainer's ``log_probs``; else None.
        """
        if not self.copies:
            await self.rollout.load_weights([], version)
            return None
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if self._source is Weights.GATHERED:
            with self._timed("pause"):
                await self.rollout.pause()
            with self._timed("transfer"):
                await self.rollout.gather_weights(version)
        else:
            await self._send(version)
        with self._timed("resume"):
            await self.rollout.resume()
        played = await self.rollout.play(self._prompts, self._sampling, n=1, seeding=(0, "canary"))
        return played.updated(await self.actor.log_probs(played))

    async def _send(self, version: int) -> None:
        with self._timed("prepare"):
            await self.actor.export_weights()
            bucket = await self.actor.next_weights(self._bucket_bytes)
        with self._timed("pause"):
            await self.rollout.pause()
        while bucket is not None:
            with self._timed("prepare"):
                following = await self.actor.next_weights(self._bucket_bytes)
            with self._timed("transfer"):
                await self.rollout.load_weights(bucket, version, last=following is None)
            bucket = following

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begun

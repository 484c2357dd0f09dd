"""Weight sync: send the actor's new weights to every engine, and verify them with a canary."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator

from hone.cluster.any_batch import AnyBatch
from hone.cluster.broadcast_sync import BroadcastSync
from hone.cluster.dispatch import RemoteTensors
from hone.cluster.rollout import Weights
from hone.cluster.runtime import Group
from hone.cluster.weight_broadcast import Bucket
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams

log = logging.getLogger("hone")

CANARY_TOKENS = 8
PARTS = ("prepare", "pause", "transfer", "resume", "check")
"""Timed parts of a weight sync: assembling whole weights, stopping engines, sending, resuming, answering the canary.

A broadcast assembles all weights but the first bucket during ``transfer``.
"""


class WeightSync:
    """Send weights from the actor to the engines.

    An engine that reads the actor's parameters needs no sync, and every batch is compared with the trainer anyway. Other engines
    have copies. Colocated ones gather the actor's shards in their process. Remote ones receive weights bucket by bucket, in one of
    two ways (``checkpoint_engine.between_workers``): through the object store, which is memory that the processes of a node share,
    copied once to every other node; or by a broadcast from the actor's device to those of the rollout workers
    (:mod:`hone.cluster.weight_broadcast`). What a failed broadcast leaves goes through the object store. Weights enter an
    engine's separate process by one of :mod:`hone.generation.remote.transports`. An engine serves no request between the first
    bucket and the last. Then every engine answers a fixed prompt, and the trainer computes the log-probs of the answers.

    Attributes:
        copies: whether engines have copies of the weights.
        sleeps: whether engines free their memory between a step's generation and its weight sync.
        seconds: seconds of each of ``PARTS`` of the last sync; empty without copies.

    Args:
        config: configuration of the run.
        actor: source of the weights.
        rollout: receiver of the weights.
        prompt: prompt of the canary.
    """

    def __init__(self, config: RLConfig, actor: Group, rollout: Group, prompt: Sample) -> None:
        self.actor, self.rollout = actor, rollout
        self._source: Weights = rollout.source().result()
        self.copies = self._source is not Weights.SHARED
        self.sleeps: bool = rollout.sleeps().result()
        self._asleep = False
        self.seconds: dict[str, float] = {}
        keys = config.actor_rollout_ref.rollout
        self._bucket_bytes = keys.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        self._broadcast = self._chosen_way(config) if self._source is Weights.REMOTE else None
        self._prompt = prompt
        self._sampling = SamplingParams(max_tokens=CANARY_TOKENS, temperature=keys.temperature, ignore_eos=True)

    async def free_engines(self, batch: AnyBatch) -> AnyBatch:
        """Let the engines free their memory until the next sync, before which they serve no request. Returns the batch unchanged."""
        await self.rollout.sleep()
        self._asleep = True
        return batch

    async def sync(self, version: int) -> AnyBatch | None:
        """Send the weights as ``version``. Engines that sleep take memory for the weights first, and for their cache afterwards.

        Returns:
            With copies, the engines' answers to the canary prompt, with the engine's ``rollout_log_probs`` and the trainer's
            ``log_probs``; else None.
        """
        if not self.copies:
            await self._wake()
            await self.rollout.load_weights([], version)
            return None
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if self._source is Weights.GATHERED:
            with self._timed("pause"):
                await self.rollout.pause()
                await self._wake(cache=False)
            with self._timed("transfer"):
                await self.rollout.gather_weights(version)
        else:
            await self._send(version)
        with self._timed("resume"):
            await self._wake()
            await self.rollout.resume()
        with self._timed("check"):
            engines = self.rollout.dp_size * await self.rollout.replicas()  # it may have changed
            prompts = [dataclasses.replace(self._prompt, uid=f"canary {number}") for number in range(engines)]
            played = await self.rollout.play(prompts, self._sampling, n=1, seeding=(0, "canary"))
            return played.updated(await self.actor.log_probs(played))

    def _chosen_way(self, config: RLConfig) -> BroadcastSync | None:
        spec = RunSpec(config)
        if spec.between_workers(on_cpu=True).value is None:
            return None
        devices = {*self.actor.device_type().result(), *self.rollout.device_type().result()}
        way = spec.between_workers(on_cpu=devices != {"cuda"})
        log.info("weights reach the rollout workers by way of %s: %s", way.value, way.reason)
        return BroadcastSync(self.actor, self.rollout, self._bucket_bytes) if way.value == "broadcast" else None

    async def _send(self, version: int) -> None:
        broadcast, stored, first = self._broadcast, None, None
        with self._timed("prepare"):
            await self.actor.export_weights()
            if broadcast is not None and await broadcast.join():
                first = await broadcast.pack_first()
            else:
                stored = await self.actor.next_weights(self._bucket_bytes)
        with self._timed("pause"):
            await self.rollout.pause()
            await self._wake(cache=False)
        if broadcast is None or first is None:
            await self._send_stored(stored, deque(), version)
            return
        with self._timed("transfer"):
            left = deque(await broadcast.send(first, version))
        if left:
            stored = await self.actor.packed_weights(left.popleft().number)
            await self._send_stored(stored, left, version)
            await broadcast.release()

    async def _send_stored(self, bucket: RemoteTensors | None, packed: deque[Bucket], version: int) -> None:
        """Send a bucket through the object store, then the packed ones, then the rest of the weights."""
        while bucket is not None:
            with self._timed("prepare"):
                if packed:
                    following = await self.actor.packed_weights(packed.popleft().number)
                else:
                    following = await self.actor.next_weights(self._bucket_bytes)
            with self._timed("transfer"):
                await self.rollout.load_weights(bucket, version, last=following is None)
            bucket = following

    async def _wake(self, *, cache: bool = True) -> None:
        if self._asleep:
            await self.rollout.wake(cache=cache)
            self._asleep = not cache

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begun

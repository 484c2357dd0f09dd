"""Weight sync: send the actor's new weights to every engine, and verify them with a canary."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hone.cluster.dispatch import Answer, RemoteTensors
from hone.cluster.failures import BroadcastError, WorkerLost
from hone.cluster.handles import Actor, AnyBatch, Rollout, Weights
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.types import Sample
from hone.generation.protocol import SamplingParams

if TYPE_CHECKING:
    from hone.cluster.weight_broadcast import Bucket

log = logging.getLogger("hone")

CANARY_TOKENS = 8
PARTS = ("prepare", "pause", "transfer", "resume", "check")
"""Timed parts of a weight sync: assembling whole weights, stopping engines, sending, resuming, answering the canary.

A broadcast assembles all weights but the first bucket during ``transfer``, and shards are gathered there.
"""


class WeightSync:
    """Send weights from the actor to the engines.

    An engine that reads the actor's parameters needs no sync, and every batch is compared with the trainer anyway. Other engines
    have copies. Colocated ones gather the actor's shards in their process. Remote ones receive weights bucket by bucket, in one of
    two ways (``RunSpec.between_workers``, a broadcast if every worker has a GPU of its own): through the object store, which is memory that the processes of a node share,
    copied once to every other node; or by a broadcast from the actor's device to those of the rollout workers
    (:mod:`hone.cluster.weight_broadcast`). What a failed broadcast leaves goes through the object store. Weights enter an
    engine's separate process by one of :mod:`hone.generation.remote.transports`. An engine serves no request between the first
    bucket and the last. Then every engine answers a fixed prompt, and the trainer computes the log-probs of the answers.

    Attributes:
        copies: whether engines have copies of the weights.
        sleeps: whether engines free their memory between a step's generation and its weight sync.
        seconds: seconds of each of ``PARTS`` of the last sync; empty without copies.

    Args:
        actor: source of the weights.
        rollout: receiver of the weights.
        prompt: prompt of the canary.
    """

    def __init__(self, config: RLConfig, actor: Actor, rollout: Rollout, prompt: Sample) -> None:
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

    async def free_engines(self) -> None:
        """Let the engines free their memory until the next sync, before which they serve no request."""
        await self.rollout.sleep()
        self._asleep = True

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


ATTEMPTS = 3
"""Failed broadcasts after which all further weight syncs take the other way."""


class BroadcastSync:
    """Broadcasts weights from the actor to the rollout workers; see :mod:`hone.cluster.weight_broadcast`.

    The members connect before the first weight sync, and again before the next one after a failure. A member whose process died
    ends the sync with :class:`~hone.cluster.failures.WorkerLost`, as any lost worker does; the run then resumes with new workers, and
    with a new instance of this class.

    Args:
        actor: source of the weights.
        rollout: receivers of the weights.
        bucket_bytes: bytes of the weights that travel together.
    """

    def __init__(self, actor: Actor, rollout: Rollout, bucket_bytes: int) -> None:
        self._actor, self._rollout, self._bucket_bytes = actor, rollout, bucket_bytes
        self._joined, self._failures = False, 0

    async def join(self) -> bool:
        """Connect the members, unless they are. Return false if they cannot connect, or too many broadcasts have failed.

        Raises:
            WorkerLost: a member died.
            ConfigError: two members have the same GPU.
        """
        if self._joined or self._failures == ATTEMPTS:
            return self._joined
        try:
            meeting = await self._actor.open_broadcast(1 + self._rollout.dp_size)
            _, error = await self._settled(self._actor.join_broadcast(), self._rollout.join_broadcast(meeting))
        except BroadcastError as refused:
            error = refused
        self._joined = error is None
        if error is not None:
            self._count(error)
        return self._joined

    async def pack_first(self) -> Bucket | None:
        """Pack the first bucket of the exported weights."""
        return await self._actor.pack_weights(0, self._bucket_bytes)

    async def send(self, bucket: Bucket | None, version: int) -> list[Bucket]:
        """Send the weights of a version, from the first bucket on.

        Returns:
            Packed buckets that the engines have not loaded, because the broadcast failed; empty if all weights are loaded.

        Raises:
            WorkerLost: a member died.
            GenerationError: an engine refuses the weights.
        """
        while bucket is not None:
            number = bucket.number
            moving = [self._actor.send_weights(number), self._rollout.receive_weights(bucket)]
            packing = self._actor.pack_weights(number + 1, self._bucket_bytes)
            loading = [self._rollout.load_bucket(number - 1, version, last=False)] if number else []
            (following, *_), error = await self._settled(packing, *moving, *loading)
            if error is not None:
                self._joined = False
                self._count(error)
                return [bucket] if following is None else [bucket, following]
            if following is None:
                await self._rollout.load_bucket(number, version, last=True)
            bucket = following
        await self.release()
        return []

    async def release(self) -> None:
        """Free the buffers."""
        await asyncio.gather(self._actor.release_buckets(), self._rollout.release_buckets())

    async def _settled(self, *calls: Answer[Any]) -> tuple[list[Any], BroadcastError | None]:
        """Wait for all calls. When one fails, the members leave the group, so that no other waits for it.

        Returns:
            The results, and the error of a broadcast that failed.

        Raises:
            BaseException: the error of a call, unless all errors are of the broadcast.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() is not None for task in done):
            await asyncio.gather(self._actor.leave_broadcast(), self._rollout.leave_broadcast(), return_exceptions=True)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        others = [error for error in errors if not isinstance(error, BroadcastError)]
        if others:
            raise next((error for error in others if isinstance(error, WorkerLost)), others[0])
        return results, next((error for error in errors if isinstance(error, BroadcastError)), None)

    def _count(self, error: BroadcastError) -> None:
        self._failures += 1
        later = "the next one tries again" if self._failures < ATTEMPTS else "so do all further ones"
        log.warning(
            "the broadcast of weights failed (%d of %d): %s; this weight sync continues through the object store, %s",
            *(self._failures, ATTEMPTS, error, later),
        )

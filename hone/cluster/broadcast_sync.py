"""The driver's part of a broadcast of weights: it makes the group, and calls both ends for every bucket."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from hone.cluster.dispatch import Answer
from hone.cluster.failures import WorkerLost
from hone.cluster.runtime import Group
from hone.cluster.weight_broadcast import BroadcastError, Bucket

log = logging.getLogger("hone")

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

    def __init__(self, actor: Group, rollout: Group, bucket_bytes: int) -> None:
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

    async def _settled(self, *calls: Answer) -> tuple[list[Any], BroadcastError | None]:
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

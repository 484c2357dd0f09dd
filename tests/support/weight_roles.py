"""Actor and rollout workers whose weights can be compared; worker processes import this file."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Sequence

import torch
from support.patience import LONG
from torch import Tensor

from hone.cluster import weight_broadcast
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.cluster.roles import PolicyWorker
from hone.cluster.rollout import RolloutWorker
from hone.cluster.weight_broadcast import Bucket
from hone.generation.build import engine_dtype

Digest = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape, and a checksum of the bytes of a weight."""
FAULTY_BUCKET = 2


def digest(name: str, tensor: Tensor) -> Digest:
    """The digest of one weight."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return name, str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest()


class ChangingActor(PolicyWorker):
    """An actor whose weights change on request."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        weight_broadcast._BASE_SECONDS = 10 * LONG  # a member that dies ends a broadcast, not its time limit

    @dispatch(Split.ALL, Collect.FIRST)
    def change(self) -> list[Digest]:
        """Change all weights; return the digests of what is exported now."""
        with torch.no_grad():
            for parameter in self.engine.model.parameters():  # type: ignore[attr-defined]
                parameter.mul_(-1.7)
        dtype = getattr(torch, engine_dtype(self.config))
        return [digest(name, tensor) for name, tensor in self.engine.export_weights("merged", dtype=dtype)]


class WatchedRollout(RolloutWorker):
    """A rollout worker that records what its engine is given and by which way, and fails on request."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        weight_broadcast._BASE_SECONDS = 10 * LONG
        self.given: list[Digest] = []
        self.ways: list[str] = []
        self.fault = ""
        inner = self.engine.load_weights

        async def load_weights(weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
            weights = list(weights)
            self.given += [digest(name, tensor) for name, tensor in weights]
            await inner(weights, version, last=last)

        self.engine.load_weights = load_weights  # type: ignore[method-assign]

    @dispatch(Split.ALL, Collect.EACH)
    def take_given(self) -> list[Digest]:
        """Return what the engine was given since the last call."""
        given, self.given = self.given, []
        return given

    @dispatch(Split.ALL, Collect.EACH)
    def take_ways(self) -> list[str]:
        """Return the way of each bucket since the last call."""
        ways, self.ways = self.ways, []
        return ways

    @dispatch(Split.ALL, Collect.EACH)
    def held(self) -> list[Digest]:
        """Return the weights that the engine samples from."""
        return [digest(name, parameter) for name, parameter in self.engine.model.named_parameters()]  # type: ignore[attr-defined]

    @dispatch(Split.ALL, Collect.EACH)
    def set_fault(self, kind: str, worker: int) -> None:
        """Have one worker fail at :data:`FAULTY_BUCKET`: ``die``, or ``leave`` the group."""
        self.fault = kind if self.context.rank == worker else ""

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Note the way."""
        self.ways.append("object_store")
        await super().load_weights(weights, version, last=last)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_bucket(self, number: int, version: int, *, last: bool) -> None:
        """Note the way."""
        self.ways.append("broadcast")
        await super().load_bucket(number, version, last=last)

    @dispatch(Split.ALL, Collect.FIRST, background=True)
    def receive_weights(self, bucket: Bucket) -> None:
        """Receive a bucket, or fail."""
        if bucket.number == FAULTY_BUCKET and self.fault == "die":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if bucket.number == FAULTY_BUCKET and self.fault == "leave":
            self.fault = ""
            self.leave_broadcast()
        super().receive_weights(bucket)

"""Requests of `hone runs engines` to a running trainer: report on the replicas, or change their number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from hone.cluster.handles import Rollout
from hone.config.tree import RLConfig
from hone.errors import ConfigError, HoneError
from hone.generation import is_served
from hone.insight.stop_requests import (
    ReplicaAnswer,
    ReplicaRequest,
    take_request,
    withdraw_request,
    write_answer,
)

PERIOD = 1.0
"""Seconds between two looks at the run directory."""

log = logging.getLogger("hone")


def replica_requests(config: RLConfig, run: Path, rollout: Rollout) -> AbstractAsyncContextManager[None]:
    """Return a block within which requests are answered; it does nothing for an engine without replicas."""
    served = is_served(config.actor_rollout_ref.rollout)
    return ReplicaControl(run, rollout).watching() if served else contextlib.nullcontext()


class ReplicaControl:
    """Answers requests about the replicas of a run while it trains."""

    def __init__(self, run: Path, rollout: Rollout) -> None:
        self._run, self._rollout = run, rollout

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Answer requests within this block. One from before belongs to an earlier process of the run, and is dropped."""
        withdraw_request(self._run)
        watch = asyncio.create_task(self._watch(), name="requests about replicas")
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                request = take_request(self._run)
                if request is not None:
                    write_answer(self._run, await self.answer(request))
            except HoneError as error:  # training continues
                log.warning("a request about the engines failed: %s", error)

    async def answer(self, request: ReplicaRequest) -> ReplicaAnswer:
        """Carry a request out, or refuse it."""
        limit, reason = await self._rollout.replica_limit()
        refused: dict[str, str] = {}
        if request.replicas is not None:
            try:
                check_count(request.replicas, limit, reason)
                await self._rollout.resize(request.replicas)
                log.info("%d replicas per rollout worker from now on", request.replicas)
            except ConfigError as error:
                refused = {"what": error.what, "why": error.why, "fix": error.fix}
        wanted, reports = await self._rollout.replicas(), await self._rollout.replica_reports()
        return ReplicaAnswer(request.key, wanted, limit, reports, refused)


def check_count(replicas: int, limit: int, reason: str) -> None:
    """Check that a number of replicas can be placed.

    Raises:
        ConfigError: it cannot.
    """
    if not 1 <= replicas <= limit:
        raise ConfigError(
            f"--replicas {replicas}: the number of a rollout worker's replicas can be 1 to {limit}",
            why=reason if replicas > limit else "a run without engines cannot generate",
            fix=f"--replicas {limit if replicas > limit else 1}",
        )

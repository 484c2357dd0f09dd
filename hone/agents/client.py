"""One engine shared by many episodes; concurrent requests reach it together, each with an answer of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from hone.data.seeding import derive_seed
from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.protocol import Completion, Engine, GenerationRequest


class EngineClient:
    """Client of an engine for any number of coroutines, each of which requests one completion at a time.

    Requests made within one turn of the event loop begin in that order within another turn. So the samples of a group share the
    prefill of their prompt, and a batch of episodes begins in the same order in every run. Each is a call of
    :meth:`Engine.generate` by itself: an error of one is not an error of the others.

    New weights may interrupt responses (:meth:`interrupt`). Each then ends at a token, and after :meth:`proceed` resumes as a request
    whose prompt contains what was sampled, so that the engine computes its KV cache again. The caller sees one completion. With
    :meth:`hold` they stay in the paused engine, which keeps their KV cache.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._under_way: set[str] = set()
        self._interrupted: set[str] = set()
        self._proceeding = asyncio.Event()
        self._proceeding.set()

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return the completion of one request. Cancelling the caller aborts the request.

        Raises:
            RequestError: the request can never be served.
            GenerationError: the engine failed.
        """
        parts: list[Completion] = []
        while True:
            await self._proceeding.wait()
            part, interrupted = await self._part(continued(request, parts))
            parts.append(part)
            if not interrupted:
                return joined(parts)

    async def interrupt(self) -> None:
        """End all responses under way at their next token, and let no request begin, until :meth:`proceed`."""
        self._proceeding.clear()
        self._interrupted |= self._under_way
        await self.engine.abort(sorted(self._under_way))

    def hold(self) -> None:
        """Let no request begin until :meth:`proceed`; those under way stay in the engine."""
        self._proceeding.clear()

    def proceed(self) -> None:
        """Resume interrupted responses and admit new requests."""
        self._proceeding.set()

    async def _part(self, request: GenerationRequest) -> tuple[Completion, bool]:
        """Return a completion, and whether :meth:`interrupt` ended it."""
        self._number += 1
        request = dataclasses.replace(request, request_id=f"{request.request_id}/{self._number}")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append((request, future))
        self._under_way.add(request.request_id)
        try:
            completion = await future
            interrupted = request.request_id in self._interrupted
            return completion, interrupted and completion.stop_reason is StopReason.ABORTED
        except asyncio.CancelledError:
            await self.engine.abort([request.request_id])
            raise
        finally:
            self._under_way.discard(request.request_id)
            self._interrupted.discard(request.request_id)

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Let the engine free the session KV caches of finished episodes."""
        await self.engine.end_sessions(sessions)

    def _send(self) -> None:
        pending, self._waiting = self._waiting, []
        for request, future in pending:
            if not future.done():
                task = asyncio.get_running_loop().create_task(self._serve(request, future))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: GenerationRequest, future: asyncio.Future[Completion]) -> None:
        failure: BaseException = GenerationError(
            f"the engine ended without an answer to request '{request.request_id}'", fix="see its log"
        )
        try:
            await self._proceeding.wait()
            async for completion in self.engine.generate([request]):
                if not future.done():
                    future.set_result(completion)
        except Exception as error:  # noqa: BLE001 - the error is the caller's answer
            failure = error
        finally:
            if not future.done():
                future.set_exception(failure)


def continued(request: GenerationRequest, parts: Sequence[Completion]) -> GenerationRequest:
    """Return the request for the rest of a response, after the parts that are sampled already."""
    ids = [token for part in parts for token in part.token_ids]
    if not ids:
        return request
    sampling = dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - len(ids))
    seed = derive_seed(request.seed, "continued", len(ids))
    return dataclasses.replace(request, prompt_ids=request.prompt_ids + ids, sampling=sampling, seed=seed)


def versions_of(part: Completion) -> list[int]:
    """Return the version of each token of a part."""
    return part.token_versions or [part.weight_versions[0]] * len(part.token_ids)


def joined(parts: Sequence[Completion]) -> Completion:
    """Return one completion with the tokens of all parts, each with the version that sampled it."""
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    return dataclasses.replace(
        last,
        request_id=first.request_id,
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[value for part in parts for value in part.log_probs],
        sampling_log_probs=[value for part in parts for value in part.sampling_log_probs],
        alternatives=[position for part in parts for position in part.alternatives],
        support_sizes=[size for part in parts for size in part.support_sizes],
        support_ids=[token for part in parts for token in part.support_ids],
        weight_versions=(first.weight_versions[0], last.weight_versions[1]),
        token_versions=[version for part in parts for version in versions_of(part)],
        expert_ids=last.expert_ids,
        seconds=sum(part.seconds for part in parts),
        first_token_seconds=first.first_token_seconds,
    )


class LimitedClient(EngineClient):
    """Client whose further requests wait, first come, first served, while as many as ``limit()`` are under way.

    A limit of None admits all.
    """

    def __init__(self, engine: Engine, limit: Callable[[], int | None]) -> None:
        super().__init__(engine)
        self.under_way = 0  # number of requests in the engine
        self._limit, self._queue = limit, deque[asyncio.Future[None]]()

    async def complete(self, request: GenerationRequest) -> Completion:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self.admit()
        try:
            await place
            request = dataclasses.replace(
                request, request_id=f"limited/{request.request_id}"
            )  # not that of another client
            return await super().complete(request)
        finally:
            if not place.cancelled():  # else it had no place
                self.under_way -= 1
                self.admit()

    def admit(self) -> None:
        """Admit waiting requests as the limit allows; called after a change of the limit."""
        while self._queue and self._has_place():
            place = self._queue.popleft()
            if not place.cancelled():
                self.under_way += 1
                place.set_result(None)

    def _has_place(self) -> bool:
        limit = self._limit()
        return limit is None or self.under_way < limit

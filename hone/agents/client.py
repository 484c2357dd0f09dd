"""One engine shared by many episodes; concurrent requests reach it together, each with an answer of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from hone.errors import GenerationError
from hone.generation.protocol import Completion, Engine, GenerationRequest


class EngineClient:
    """Client of an engine for any number of coroutines, each of which requests one completion at a time.

    Requests made within one turn of the event loop begin in that order within another turn. So the samples of a group share the
    prefill of their prompt, and a batch of episodes begins in the same order in every run. Each is a call of
    :meth:`Engine.generate` by itself: an error of one is not an error of the others.

    Args:
        engine: engine that serves the requests.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return the completion of one request. Cancelling the caller aborts the request.

        Raises:
            RequestError: the request can never be served.
            GenerationError: the engine failed.
        """
        self._number += 1
        request = dataclasses.replace(request, request_id=f"{request.request_id}/{self._number}")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            await self.engine.abort([request.request_id])
            raise

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
            async for completion in self.engine.generate([request]):
                if not future.done():
                    future.set_result(completion)
        except Exception as error:  # noqa: BLE001 - the error is the caller's answer
            failure = error
        finally:
            if not future.done():
                future.set_exception(failure)

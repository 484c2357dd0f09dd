"""One engine shared by many episodes; concurrent requests are batched into one call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from hone.errors import GenerationError
from hone.generation.protocol import Completion, Engine, GenerationRequest


class EngineClient:
    """Client of an engine for any number of coroutines, each of which requests one completion at a time.

    Requests made within one turn of the event loop become one call of :meth:`Engine.generate`. So the samples of a group share
    the prefill of their prompt with every engine, and a batch of episodes begins in the same order in every run.

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
            GenerationError: the request can never be served, or the engine lost it.
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
        pending = [(request, future) for request, future in self._waiting if not future.done()]
        self._waiting = []
        if pending:
            task = asyncio.get_running_loop().create_task(self._serve(pending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, pending: Sequence[tuple[GenerationRequest, asyncio.Future[Completion]]]) -> None:
        futures = {request.request_id: future for request, future in pending}
        failure: BaseException | None = None
        try:
            async for completion in self.engine.generate([request for request, _ in pending]):
                future = futures.pop(completion.request_id, None)
                if future is not None and not future.done():
                    future.set_result(completion)
        except BaseException as error:  # waiting callers must receive the error
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            for name, future in futures.items():
                if not future.done():
                    lost = GenerationError(f"the engine ended without an answer to request '{name}'", fix="see its log")
                    future.set_exception(failure if isinstance(failure, Exception) else lost)

"""One engine for many episodes: requests that are made at the same moment go to it in one call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from hone.errors import GenerationError
from hone.generation.protocol import Completion, Engine, GenerationRequest


class EngineClient:
    """Asks an engine for one completion at a time, from any number of coroutines.

    What is asked for before the event loop turns over is one call of :meth:`Engine.generate`: so the samples of a group share
    the prefill of their prompt with every engine, and a batch of episodes begins in the same order in every run.

    Args:
        engine: serves the requests.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    async def complete(self, request: GenerationRequest) -> Completion:
        """The completion of one request. A caller that is cancelled ends its request.

        Raises:
            GenerationError: it can never be served, or the engine lost it.
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
        """These episodes are over: what the engine keeps of them can go."""
        await self.engine.end_sessions(sessions)

    def _send(self) -> None:
        asked = [(request, future) for request, future in self._waiting if not future.done()]
        self._waiting = []
        if asked:
            task = asyncio.get_running_loop().create_task(self._serve(asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, asked: Sequence[tuple[GenerationRequest, asyncio.Future[Completion]]]) -> None:
        futures = {request.request_id: future for request, future in asked}
        failure: BaseException | None = None
        try:
            async for completion in self.engine.generate([request for request, _ in asked]):
                future = futures.pop(completion.request_id, None)
                if future is not None and not future.done():
                    future.set_result(completion)
        except BaseException as error:  # whoever waits must hear of it
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            for name, future in futures.items():
                if not future.done():
                    lost = GenerationError(f"the engine ended without an answer to request '{name}'", fix="see its log")
                    future.set_exception(failure if isinstance(failure, Exception) else lost)

"""Sampling from several sets of weights with one engine: requests of one set run together, and the sets take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from pathlib import Path

from hone.generation.protocol import Completion, Engine, GenerationRequest
from hone.trainers.service.adapters import AdapterSet, Datum, shape_of

_SLOTS = 4
"""Saved adapters that stay in the model for sampling; the one that was not used for the longest time leaves."""


class Sampler:
    """Samples from the base model, or from saved adapters.

    Args:
        engine: reads the model of ``adapters``.
        adapters: the model.

    Attributes:
        version: number of the weights in use; it rises with every change, and no two sets of weights have the same.
    """

    def __init__(self, engine: Engine, adapters: AdapterSet) -> None:
        self._engine, self._adapters = engine, adapters
        self.version = 0
        self._slots: OrderedDict[Path, str] = OrderedDict()
        self._names = 0
        self._current: Path | None = None
        self._running = 0
        self._waiting: deque[tuple[Path | None, asyncio.Event]] = deque()

    async def complete(self, weights: Path | None, request: GenerationRequest) -> Completion:
        """Return the completion of a request by the weights saved in a folder; None samples from the base model."""
        async with self._turn(weights):
            return [completion async for completion in self._engine.generate([request])][0]

    async def score(self, weights: Path | None, datum: Datum) -> list[float]:
        """Return the log-probs of a sequence's targets by the weights saved in a folder, or by the base model."""
        async with self._turn(weights):
            name = self._adapters.active
            (log_probs,) = self._adapters.forward(name, [datum])
            return log_probs.tolist()

    @contextlib.asynccontextmanager
    async def _turn(self, weights: Path | None) -> AsyncIterator[None]:
        """Wait until the engine samples from these weights; those that came first have the first turn."""
        if self._running == 0 and not self._waiting:
            await self._use(weights)
            self._running += 1
        elif weights == self._current and not self._waiting:
            self._running += 1
        else:
            await self._wait(weights)
        try:
            yield
        finally:
            await self._leave()

    async def _wait(self, weights: Path | None) -> None:
        """Wait for a turn; who grants it has counted this request as running."""
        place = (weights, asyncio.Event())
        self._waiting.append(place)
        try:
            await place[1].wait()
        except asyncio.CancelledError:
            if place[1].is_set():
                await self._leave()
            else:
                self._waiting.remove(place)
            raise

    async def _leave(self) -> None:
        self._running -= 1
        if self._running or not self._waiting:
            return
        weights = self._waiting[0][0]
        await self._use(weights)
        together = [place for place in self._waiting if place[0] == weights]
        self._waiting = deque(place for place in self._waiting if place[0] != weights)
        self._running += len(together)
        for _, event in together:
            event.set()

    async def _use(self, weights: Path | None) -> None:
        if weights == self._current and self.version:
            self.activate()
            return
        self._current = weights
        if weights is not None:
            self._load(weights)
        self.activate()
        self.version += 1
        await self._engine.load_weights([], self.version)

    def activate(self) -> None:
        """Activate the adapter in use; training activates others in between."""
        self._adapters.activate(None if self._current is None else self._slots[self._current])

    def _load(self, weights: Path) -> None:
        """Have the adapter of a folder in the model."""
        if weights in self._slots:
            self._slots.move_to_end(weights)
            return
        if len(self._slots) >= _SLOTS:
            _, name = self._slots.popitem(last=False)
            self._adapters.remove(name)
        self._names += 1
        name = f"hone_sampling_{self._names}"
        self._adapters.add(name, shape_of(weights), trained=False)
        self._adapters.load(name, weights, optimizer=False)
        self._slots[weights] = name

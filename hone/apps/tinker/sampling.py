"""Sampling from several sets of weights with one engine: requests of one set run together, and the sets take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from pathlib import Path

from hone.apps.tinker.adapters import AdapterSet, Datum, shape_of
from hone.generation.protocol import Completion, Engine, GenerationRequest

_REPLACED = Path("replaced")
"""In place of a folder whose weights were replaced while requests used them; no folder of weights is relative."""
_SLOTS = 4
"""Saved adapters that stay in the model for sampling; the one that was not used for the longest time leaves."""


class Sampler:
    """Samples from the base model, or from saved adapters."""

    def __init__(self, engine: Engine, adapters: AdapterSet) -> None:
        self._engine, self._adapters = engine, adapters
        # number of the weights in use; it rises with every change, and no two sets of weights have the same
        self.version = 0
        self._slots: OrderedDict[Path, str] = OrderedDict()
        self._names = 0
        self._current: Path | None = None
        self._adapter: str | None = None
        self._outdated: list[str] = []
        self._running = 0
        self._waiting: deque[tuple[Path | None, asyncio.Future[None]]] = deque()

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
        turn = asyncio.get_running_loop().create_future()
        place = (weights, turn)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not turn.cancelled():
                await self._leave()
            raise

    async def _leave(self) -> None:
        """Give the turn to the requests that wait for the same weights as the first; weights that cannot be loaded are their error."""
        self._running -= 1
        while self._waiting and not self._running:
            weights = self._waiting[0][0]
            together = [turn for one, turn in self._waiting if one == weights and not turn.done()]
            self._waiting = deque(place for place in self._waiting if place[0] != weights)
            if not together:  # all of them were cancelled
                continue
            try:
                await self._use(weights)
            except Exception as error:  # noqa: BLE001 - the error is the requests' answer
                for turn in together:
                    turn.set_exception(error)
                continue
            self._running = len(together)
            for turn in together:
                turn.set_result(None)

    async def _use(self, weights: Path | None) -> None:
        if weights == self._current and self.version:
            self.activate()
            return
        adapter = None if weights is None else self._load(weights)
        self._current, self._adapter = weights, adapter
        for name in self._outdated:
            self._adapters.remove(name)
        self._outdated = []
        self.activate()
        self.version += 1
        await self._engine.load_weights([], self.version)

    def activate(self) -> None:
        """Activate the adapter in use; training activates others in between."""
        self._adapters.activate(self._adapter)

    def forget(self, weights: Path) -> None:
        """Load these weights again when they are next used: their folder has others now. Requests under way keep the old ones."""
        name = self._slots.pop(weights, None)
        if name is not None:
            self._outdated.append(name)
        if weights == self._current:
            self._current = _REPLACED

    def _load(self, weights: Path) -> str:
        """Return the adapter of a folder, which is in the model then."""
        if weights in self._slots:
            self._slots.move_to_end(weights)
            return self._slots[weights]
        self._names += 1
        name = f"hone_sampling_{self._names}"
        self._adapters.add(name, shape_of(weights), trained=False)
        try:
            self._adapters.load(name, weights, optimizer=False)
        except Exception:
            self._adapters.remove(name)
            raise
        self._slots[weights] = name
        if len(self._slots) > _SLOTS:
            self._outdated.append(self._slots.popitem(last=False)[1])
        return name

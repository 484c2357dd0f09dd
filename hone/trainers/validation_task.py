"""Validation during training: a task of its own, which takes a share of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hone.agents.player import gather_or_cancel


class ValidationTask:
    """The validation of one step's weights, while the next step generates and trains.

    One at a time: the next weight sync waits for it, so all its answers are by the same weights.

    Args:
        validate: function that validates the weights of a step and logs the metrics.
        limit: function that sets the share of the engines' requests that validation may take; None means no limit.
        share: this share while groups are under way.

    Attributes:
        step: step whose weights are validated, until :meth:`collect`; None if there is none.
    """

    def __init__(
        self,
        validate: Callable[[int], Awaitable[None]],
        limit: Callable[[float | None], Awaitable[None]],
        share: float,
    ) -> None:
        self._validate, self._limit, self._share = validate, limit, share
        self.step: int | None = None
        self._task: asyncio.Task[object] | None = None
        self._alone = asyncio.Event()

    async def begin(self, step: int, on_end: Callable[[], None]) -> None:
        """Start to validate the weights of a step; ``on_end`` is called at the end, also after an error."""
        assert self.step is None, "the validation of an earlier step has not ended"
        self.step = step
        self._alone.clear()
        await self._limit(self._share)
        both = gather_or_cancel([self._play(step), self._lift()])
        self._task = asyncio.get_running_loop().create_task(both, name=f"validation {step}")
        self._task.add_done_callback(lambda _: on_end())

    def lift(self) -> None:
        """Let validation take all of the engines: no group is under way, and none begins before it ends."""
        self._alone.set()

    @property
    def has_ended(self) -> bool:
        """True if no validation is under way."""
        return self._task is None or self._task.done()

    def collect(self) -> None:
        """Take note of the end of the validation, and raise its error if it failed."""
        task, self._task, self.step = self._task, None, None
        if task is not None:
            task.result()

    async def _play(self, step: int) -> None:
        try:
            await self._validate(step)
        finally:
            self._alone.set()

    async def _lift(self) -> None:
        await self._alone.wait()
        await self._limit(None)

"""Event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

>>> async def nap():
...     await asyncio.sleep(3600)
...     return asyncio.get_running_loop().time()
>>> run(nap())
3600.0

Everything runs in one thread and no file or socket is read, so two runs of the same coroutines are equal. If nothing is ready and no
timer is left, every task waits for another one: a deadlock, which raises an error instead of hanging.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No task can ever continue; the message lists the waiting tasks."""


class Crash(RuntimeError):
    """The run ended at the virtual time that was given for it."""


class _Timers(selectors.SelectSelector):
    """Selector that advances virtual time instead of waiting."""

    loop: VirtualLoop
    until = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(
                f"deadlock at {self.loop.time():g} s of virtual time: {'; '.join(waits(self.loop)) or 'no task'}"
            )
        if self.loop.time() + timeout > self.until:
            self.until = math.inf  # tasks are cancelled next
            raise Crash(f"at {self.loop.time():g} s of virtual time")
        self.loop.advance(max(0.0, timeout))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time is a number that starts at 0 and advances only between events.

    Args:
        until: virtual time at which the run crashes.
    """

    def __init__(self, until: float = math.inf) -> None:
        self._virtual_time = 0.0
        timers = _Timers()
        timers.loop, timers.until = self, until
        super().__init__(timers)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_time

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._virtual_time += seconds


def run(main: Coroutine[Any, Any, T], *, until: float = math.inf) -> T:
    """Run a coroutine to its end on virtual time, starting at 0.

    Raises:
        Deadlock: no task can continue.
        Crash: the next event comes after ``until``.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(until)) as runner:
        return runner.run(main)


def waits(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return where the unfinished tasks wait, named tasks first and the others counted."""
    named, others = [], Counter[str]()
    for task in asyncio.all_tasks(loop):
        name, place = task.get_name(), _innermost(task.get_coro())
        if name.startswith("Task-"):
            others[place] += 1
        else:
            named.append(f"{name} waits in {place}")
    return sorted(named) + [f"{count} x {place}" for place, count in sorted(others.items())]


def _innermost(coroutine: Any) -> str:
    name = "?"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and frame.f_globals.get("__name__", "").startswith("hone"):
            name = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return name

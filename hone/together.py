"""Tasks that succeed or fail together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

T = TypeVar("T")

HURRY = threading.Event()
"""Set while work is cancelled: an engine in this process then gives control back after each step."""


async def gather_or_cancel(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Return all results in order; if one coroutine fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


async def watched(work: Coroutine[None, None, T], look: Callable[[], object], every: float = 0.5) -> T | None:
    """Return the result of ``work``, and call ``look`` now and then meanwhile; once it returns true, cancel the work: None."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=every))[0]:
            if look():
                return None
        return task.result()
    finally:
        if task.cancel():
            await asyncio.wait([task])


def _first(group: BaseExceptionGroup) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

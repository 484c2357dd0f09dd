"""Calls from a notebook, whose cells run inside an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def blocking(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that starts event loops of its own run inside the loop of a notebook, which waits for its end.

    asyncio refuses a loop within a loop. The notebook's loop is taken from this thread for the time of the call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = asyncio._get_running_loop()
        if outer is None:
            return function(*args, **kwargs)
        asyncio._set_running_loop(None)
        try:
            return function(*args, **kwargs)
        finally:
            asyncio.set_event_loop(outer)
            asyncio._set_running_loop(outer)

    return call

"""Calls of the API: inside the event loop of a notebook, and with short tracebacks for a user's mistakes."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hone.errors import HoneError

P = ParamSpec("P")
R = TypeVar("R")

DEBUG_VARIABLE = "HONE_DEBUG"
"""Environment variable that keeps the internal frames in the traceback of a user's mistake."""


def api_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function callable in a notebook, and raise its :class:`HoneError` without the frames inside the package.

    A function that starts event loops of its own cannot run inside the loop of a notebook, because asyncio refuses a loop within
    a loop. The notebook's loop is taken from this thread for the time of the call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            return function(*args, **kwargs)
        except HoneError as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            raise error.with_traceback(None) from None
        finally:
            if outer is not None:
                asyncio.set_event_loop(outer)
                asyncio._set_running_loop(outer)

    return call

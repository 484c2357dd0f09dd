"""Functions of the user that a run calls after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

OnStep = Callable[[int, Mapping[str, float]], object]
"""Function of a step and its metrics; when it returns True, the run saves its state and ends after this step."""

_ON_STEP: ContextVar[tuple[OnStep, ...]] = ContextVar("on_step", default=())


@contextmanager
def calling(*functions: OnStep | None) -> Iterator[None]:
    """Let runs that start in this context call the functions after each step."""
    token = _ON_STEP.set(tuple(function for function in functions if function is not None))
    try:
        yield
    finally:
        _ON_STEP.reset(token)


def step_callbacks() -> tuple[OnStep, ...]:
    """Return the functions for runs that start here."""
    return _ON_STEP.get()

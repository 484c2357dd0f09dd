"""Functions of the user that a run calls: for each scored rollout, and after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

OnStep = Callable[[int, Mapping[str, float]], object]
"""Function of a step and its metrics; when it returns True, the run saves its state and ends after this step."""

OnSample = Callable[[dict[str, Any]], object]
"""Function of a scored rollout, a record of the archive; True ends the run like that of :data:`OnStep`."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that a run calls.

    Attributes:
        on_step: function of each step, or None.
        on_sample: function of each scored rollout of training, or None.
    """

    on_step: OnStep | None = None
    on_sample: OnSample | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Call ``on_step``; return True if the run should end."""
        return self.on_step is not None and self.on_step(step, dict(metrics)) is True

    def samples(self, records: Sequence[dict[str, Any]]) -> bool:
        """Call ``on_sample`` for every record of a step; return True if the run should end."""
        assert self.on_sample is not None
        answers = [self.on_sample(record) for record in records]
        return any(answer is True for answer in answers)


_CALLBACKS: ContextVar[Callbacks] = ContextVar("callbacks", default=Callbacks())  # noqa: B039 - it is frozen


@contextmanager
def calling(callbacks: Callbacks) -> Iterator[None]:
    """Let runs that start in this context call the functions."""
    token = _CALLBACKS.set(callbacks)
    try:
        yield
    finally:
        _CALLBACKS.reset(token)


def run_callbacks() -> Callbacks:
    """Return the functions for runs that start here."""
    return _CALLBACKS.get()

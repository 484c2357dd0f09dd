"""Target of a worker process, and the messages between the process and the pool."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hone.rewards.frames import MAX_ANSWER
from hone.rewards.outcome import to_score, to_scores
from hone.rewards.score import Score

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
PLURALS = tuple(f"{name}s" for name in ARGUMENTS)
BROKEN = 70
"""Exit code of a worker that failed outside of the function (EX_SOFTWARE)."""


@dataclass(frozen=True)
class Target:
    """Function or scorers that a worker calls.

    Attributes:
        timeout: seconds per call (asynchronous calls are cancelled here; the parent kills the worker for others).
        path: file of a reward function, or its shown name with ``code``; None for the built-in scorers.
        name: name of the function in the file.
        kwargs: additional keyword arguments of every call.
        code: the function itself, pickled in the pool's process; None if it is in the file.
        scorers: built-in scorers to prepare.
        batch: True if a call scores many responses: arguments and return value are lists.
    """

    timeout: float
    path: str | None = None
    name: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    code: bytes | None = None
    scorers: tuple[str, ...] = ()
    batch: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of each call, without ``kwargs``."""
        return PLURALS if self.batch else ARGUMENTS

    @property
    def signature(self) -> str:
        """Signature that the function should have."""
        return f"def compute_score({', '.join(self.arguments)}, **kwargs)"

    @property
    def shown(self) -> str:
        """Description for messages."""
        return self.path or f"the built-in scorers {', '.join(self.scorers)}"

    def read(self, value: Any, call: dict[str, Any]) -> Score | list[Score]:
        """Convert a call's return value to a score, or to the scores of a batch."""
        return to_scores(value, len(call[PLURALS[0]])) if self.batch else to_score(value)


@dataclass
class Outcome:
    """Score of a call, with the traceback if it raised, and all scores of a batch call."""

    score: Score
    traceback: str | None = None
    batch: list[Score] | None = None


@dataclass(frozen=True)
class Ready:
    """Message that the function is loaded."""

    is_async: bool

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps({"ready": vars(self)}).encode()


class LoadFailure(Exception):
    """Message that the function cannot be loaded.

    Attributes:
        what: description of the problem.
        fix: fix of the problem.
        traceback: traceback of the user's file, if it raised.
    """

    def __init__(self, what: str, fix: str, traceback: str = "") -> None:
        super().__init__(what, fix, traceback)
        self.what, self.fix, self.traceback = what, fix, traceback

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps({"failure": {"what": self.what, "fix": self.fix, "traceback": self.traceback}}).encode()


def decode_start(body: bytes) -> Ready | LoadFailure:
    """Return a worker's first message.

    Raises:
        ValueError: it is another message.
    """
    try:
        message = json.loads(body)
        if "ready" in message:
            return Ready(**message["ready"])
        return LoadFailure(**message["failure"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the worker's first message cannot be read: {error}") from error


def encode_result(number: int, result: Score | list[Score], trace: str | None) -> bytes:
    """Return the result of call ``number`` as JSON.

    Raises:
        ValueError, TypeError, RecursionError: what the function returned has no JSON form.
    """
    scores = result if isinstance(result, list) else [result]
    fields = [vars(score) for score in scores]
    body = json.dumps([number, isinstance(result, list), fields, trace]).encode()
    if len(body) > MAX_ANSWER:
        raise ValueError(f"returned {len(body)} bytes, more than the {MAX_ANSWER} that an answer may have")
    return body


def decode_result(body: bytes) -> tuple[int, Outcome]:
    """Return a call's number and outcome.

    Raises:
        ValueError: it is another message.
    """
    try:
        number, is_batch, fields, trace = json.loads(body)
        scores = [Score(**entry) for entry in fields]
        return int(number), Outcome(scores[0], trace, scores if is_batch else None)
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"the worker's answer cannot be read: {error}") from error

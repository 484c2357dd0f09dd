"""Target of a worker process, and the messages between the process and the pool."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.rewards.frames import MAX_ANSWER
from hone.rewards.outcome import to_score, to_scores
from hone.rewards.score import Score

CONVERSATIONS = "conversations_of_responses"
"""Name under which the pool sends the conversations, which only functions of the second kind receive."""


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; one of TRL's has ``completions``."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


class Adapted:
    """Reward function that takes the arguments the pool sends, whatever its own signature: Hone's or that of TRL.

        def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)      one response
        def reward(completions, prompts=..., **columns)                                       lists, recognised by ``completions``

    A function of the second kind gets one list entry per response of the call: the completion (where the prompt is chat messages, the
    messages after it: one of the assistant, or those of the episode with its tool messages), ``completion_ids``, and the columns
    ``prompts``, ``ground_truth``, ``data_source`` and those of ``extra_info``. A function of the first kind may also take ``last_answer``
    (``last_answers`` where the arguments are lists): the last turn without thoughts and tool calls.

    Args:
        kwargs: additional keyword arguments of every call.
        batch: True if the arguments of a call are lists.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, batch: bool) -> None:
        self.function, self.kwargs, self.batch = function, dict(kwargs), batch
        self.by_columns = takes(function, "completions")
        self._answer = "last_answers" if batch else "last_answer"
        self._with_answer = takes(function, self._answer) and self._answer not in kwargs
        names = PLURALS if batch else ARGUMENTS
        self.arguments = (*names, self._answer) if self._with_answer else names

    @property
    def is_async(self) -> bool:
        called = type(self.function).__call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    def __call__(self, **arguments: Any) -> Any:
        """Call the function; return its value, or a coroutine of it."""
        conversations = arguments.pop(CONVERSATIONS, None)
        if not self.by_columns and self._with_answer:
            extras = arguments["extra_infos"] if self.batch else [arguments["extra_info"]]
            answers = [extra.get("last_answer") for extra in extras]
            arguments[self._answer] = answers if self.batch else answers[0]
        if not self.by_columns:
            return self.function(**arguments, **self.kwargs)
        value = self.function(**self._columns(arguments, conversations), **self.kwargs)
        return self._awaited(value) if inspect.isawaitable(value) else self._one_or_all(value)

    async def _awaited(self, value: Any) -> Any:
        return self._one_or_all(await value)

    def _one_or_all(self, values: Any) -> Any:
        if self.batch:
            return values
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 1:
            return values[0]
        raise ValueError(f"returned {values!r} for a list of 1 completion, not a list of 1 number")

    def _columns(self, arguments: Mapping[str, Any], conversations: Any) -> dict[str, list[Any]]:
        if self.batch:
            texts, truths = arguments["solution_strs"], arguments["ground_truths"]
            sources, extras = arguments["data_sources"], arguments["extra_infos"]
        else:
            texts, truths = [arguments["solution_str"]], [arguments["ground_truth"]]
            sources, extras = [arguments["data_source"]], [arguments["extra_info"]]
        held = conversations or [{"prompt": None, "turns": None, "ids": []}] * len(texts)
        names = dict.fromkeys(name for extra in extras for name in extra)
        columns = {name: [extra.get(name) for extra in extras] for name in names}
        completions = [
            text if one["prompt"] is None else one["turns"] or [{"role": "assistant", "content": text}]
            for text, one in zip(texts, held, strict=True)
        ]
        columns |= {"prompts": [one["prompt"] for one in held], "completions": completions, "data_source": sources}
        columns["completion_ids"] = [list(one["ids"]) for one in held]
        return {"ground_truth": truths, **columns}


ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
PLURALS = tuple(f"{name}s" for name in ARGUMENTS)
BROKEN = 70  # exit code of a worker that failed outside of the function (EX_SOFTWARE)


@dataclass(frozen=True)
class Target:
    """Function or scorers that a worker calls."""

    timeout: float  # seconds per call (asynchronous calls are cancelled here; the parent kills the worker for others)
    path: str | None = None  # file of a reward function, or its shown name with ``code``; None for the built-in scorers
    name: str = ""  # name of the function in the file
    kwargs: dict[str, Any] = field(default_factory=dict)  # additional keyword arguments of every call
    code: bytes | None = None  # the function itself, pickled in the pool's process; None if it is in the file
    scorers: tuple[str, ...] = ()  # built-in scorers to prepare
    batch: bool = False  # True if a call scores many responses: arguments and return value are lists

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of each call, without ``kwargs``."""
        return PLURALS if self.batch else ARGUMENTS

    @property
    def signature(self) -> str:
        return f"def compute_score({', '.join(self.arguments)}, **kwargs)"

    @property
    def shown(self) -> str:
        return self.path or f"the built-in scorers {', '.join(self.scorers)}"

    def read(self, value: Any, call: dict[str, Any]) -> Score | list[Score]:
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
        return json.dumps({"ready": vars(self)}).encode()


class LoadFailure(Exception):
    """Message that the function cannot be loaded."""

    def __init__(self, what: str, fix: str, traceback: str = "") -> None:
        super().__init__(what, fix, traceback)
        self.what, self.fix, self.traceback = what, fix, traceback

    def encode(self) -> bytes:
        return json.dumps({"failure": {"what": self.what, "fix": self.fix, "traceback": self.traceback}}).encode()


def decode_start(body: bytes) -> Ready | LoadFailure:
    """Return a worker's first message. Raises ValueError: it is another message."""
    try:
        message = json.loads(body)
        if "ready" in message:
            return Ready(**message["ready"])
        return LoadFailure(**message["failure"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the worker's first message cannot be read: {error}") from error


def encode_result(number: int, result: Score | list[Score], trace: str | None) -> bytes:
    """Return the result of call ``number`` as JSON. Raises ValueError, TypeError, RecursionError: what the function
    returned has no JSON form.
    """
    scores = result if isinstance(result, list) else [result]
    fields = [vars(score) for score in scores]
    body = json.dumps([number, isinstance(result, list), fields, trace]).encode()
    if len(body) > MAX_ANSWER:
        raise ValueError(f"returned {len(body)} bytes, more than the {MAX_ANSWER} that an answer may have")
    return body


def decode_result(body: bytes) -> tuple[int, Outcome]:
    """Return a call's number and outcome. Raises ValueError: it is another message."""
    try:
        number, is_batch, fields, trace = json.loads(body)
        scores = [Score(**entry) for entry in fields]
        return int(number), Outcome(scores[0], trace, scores if is_batch else None)
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"the worker's answer cannot be read: {error}") from error

"""Target of a worker process, the :class:`Score` of what it returns or raises, and the messages between the process and the pool."""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import NoVerdict
from hone.insight.redaction import redact_text
from hone.rewards.frames import MAX_ANSWER
from hone.rewards.score import Cause, Score
from hone.text import valid_data, valid_text

LARGEST = 1e16
"""Largest absolute reward or term: the sum of a million squares of it is finite in float32, in which advantages are computed."""
MAX_NESTING = 32
"""Levels of lists and dicts that are kept of an extra value; writers and trackers walk through them recursively."""
PLACED = ("turn_rewards", "token_rewards")  # keys of a returned dict that assign the score to turns or tokens


def to_score(value: Any) -> Score:
    """Convert the return value of a scorer: a number, or a dict with ``score``.

    Other numeric entries of the dict become terms, the rest is kept as extra. None, :class:`NoVerdict` and a value that is not a
    finite number of at most :data:`LARGEST` are no verdict, never a silent 0.
    """
    if isinstance(value, Score):
        return value
    if value is None:
        return failed("returned None", Cause.DECLINED)
    if isinstance(value, NoVerdict):
        return failed(f"returned NoVerdict: {value.reason}", Cause(value.cause))
    if isinstance(value, Mapping):
        return _from_mapping(value)
    number = as_number(value)
    if number is None:
        return failed(f"returned {_describe(value)}, not a number or a dict with 'score'")
    return Score(number) if is_usable(number) else failed(f"returned {shown_number(number)}")


def to_scores(value: Any, count: int) -> list[Score]:
    """Convert the return value of a function that scored ``count`` responses in one call.

    It must be a sequence of values for :func:`to_score`; otherwise no response has a verdict.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or len(value) != count:
        scores = "1 score" if count == 1 else f"{count} scores"
        return [failed(f"returned {_describe(value)}, not a list of {scores}")] * count
    return [to_score(entry) for entry in value]


def failed(error: str, cause: Cause = Cause.INVALID) -> Score:
    return Score(0.0, error=valid_text(error), cause=cause)


def failed_by(error: BaseException, shown: str) -> Score:
    """Return the score of a response whose scoring raised; ``shown`` is the error in one line, and may hold a secret."""
    return failed(redact_text(shown), Cause(error.cause) if isinstance(error, NoVerdict) else Cause.RAISED)


def is_usable(number: float) -> bool:
    """Return whether a reward is finite, and small enough that float32 can compute with it."""
    return math.isfinite(number) and abs(number) <= LARGEST


def shown_number(number: float) -> str:
    """Return a number that is not usable, with the limit if it is a finite one."""
    return f"{number:g}, more than {LARGEST:g} in absolute value" if math.isfinite(number) else str(number)


def as_number(value: Any) -> float | None:
    """Convert a number, bool, or numpy or torch scalar to a float; return None for anything else.

    A number beyond the range of floats becomes infinite.
    """
    if not isinstance(value, numbers.Real):
        item = getattr(value, "item", None)
        value = item() if callable(item) and getattr(value, "ndim", None) == 0 else None
    if not isinstance(value, numbers.Real):
        return None
    number: Any = value  # comparisons of Real are not declared
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _from_mapping(value: Mapping[Any, Any]) -> Score:
    if "score" not in value:
        return failed(f"returned a dict without 'score'; it has {sorted(map(str, value))}")
    score = to_score(value["score"]) if not isinstance(value["score"], Mapping) else failed("'score' is a dict")
    if score.error is not None:
        score.error = score.error.replace("returned", "'score' is", 1)
        return score
    for key, entry in value.items():
        name, number = valid_text(str(key)), as_number(entry)
        if name == "score":
            continue
        if name in PLACED:
            rewards = _numbers(entry)
            if rewards is None:
                return failed(f"'{name}' is {_describe(entry)}, not a list of finite numbers")
            setattr(score, name, rewards)
        elif number is None:
            score.extra[name] = valid_data(_plain_data(entry))
        elif is_usable(number):
            score.terms[name] = number
        else:
            return failed(f"term '{name}' is {shown_number(number)}")
    return score


def _numbers(value: Any) -> list[float] | None:
    """Convert a sequence or array of finite numbers to a list; return None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return None
    numbers = [as_number(entry) for entry in value]
    finite = [number for number in numbers if number is not None and is_usable(number)]
    return finite if len(finite) == len(numbers) else None


def _plain_data(value: Any, level: int = 0) -> Any:
    """Convert a value to plain data: arrays to lists, other objects and what is below :data:`MAX_NESTING` levels to text."""
    if level > MAX_NESTING:
        return f"{type(value).__name__}, nested too deeply to be kept"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_data(entry, level + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_data(entry, level + 1) for entry in value]
    return repr(value)


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    size = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size} ({str(value)[:60]!r})"


LATEST = 64  # number of latest responses over which the rate is taken; a larger batch counts as a whole
FEWEST = 16
"""Number of responses from which on a rate is meaningful: fewer are treated as if the missing ones all had a verdict."""


class NoVerdictRate:
    """Rate of missing verdicts over the latest responses. ``limit``: largest rate that is tolerated, 0 to 1."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._latest: deque[tuple[int, int]] = deque()  # (missing, responses) of each call

    @property
    def counted(self) -> int:
        return sum(count for _, count in self._latest)

    def allowed(self, count: int) -> int:
        """Return how many of the next ``count`` responses may lack a verdict."""
        earlier = self._window(count)
        responses, missing = count + sum(c for _, c in earlier), sum(m for m, _ in earlier)
        return max(0, int(self._limit * max(responses, FEWEST if self._limit else 0) + 1e-9) - missing)

    def add(self, missing: int, count: int) -> bool:
        """Count the responses of a call; return whether there are more missing verdicts than tolerated."""
        allowed = self.allowed(count)
        self._latest = deque([*self._window(count), (missing, count)])
        return missing > allowed

    def _window(self, count: int) -> list[tuple[int, int]]:
        """Return the latest calls that fit into :data:`LATEST` responses together with ``count`` more."""
        kept: list[tuple[int, int]] = []
        for missing, responses in reversed(self._latest):
            count += responses
            if count > LATEST:
                break
            kept.insert(0, (missing, responses))
        return kept


def no_verdict_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return ``reward/no_verdict_rate``, and the number of responses by cause as ``reward/no_verdict/<cause>``."""
    causes = Counter(str(score.cause) for score in scores if score.error is not None)
    counts = {f"reward/no_verdict/{cause.value}": float(causes[cause]) for cause in Cause if causes[cause]}
    return {"reward/no_verdict_rate": sum(causes.values()) / max(1, len(scores)), **counts}


CONVERSATIONS = "conversations_of_responses"
"""Name under which the pool sends the conversations, which only functions of the second kind receive."""


HAVE = "; the rows have "  # in an error about a column, before the names of those that there are


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
        columns = self._columns(arguments, conversations)
        try:
            inspect.signature(self.function).bind(**columns, **self.kwargs)
        except TypeError as error:
            raise TypeError(f"{error}{HAVE}{', '.join(columns)}") from None
        value = self.function(**columns, **self.kwargs)
        return self._awaited(value) if inspect.isawaitable(value) else self._one_or_all(value)

    async def _awaited(self, value: Any) -> Any:
        return self._one_or_all(await value)

    def _one_or_all(self, values: Any) -> Any:
        return values if self.batch else to_scores(values, 1)[0]

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
            one["turns"] or [{"role": "assistant", "content": text}] if isinstance(one["prompt"], list) else text
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

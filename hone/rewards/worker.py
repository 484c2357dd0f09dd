"""Worker process that loads one reward function and runs the calls that the pool sends; and what both sides know: the target of the
process, the :class:`Score` of what a function returns or raises, the messages.

The process's arguments are the number of an inherited socket, its nonce, and the folder in which the run's processes publish their activity. It
starts as a new program, not by fork: it has no locks or threads of the trainer, and a script without ``if __name__ == "__main__"`` does
not run twice.

    pool -> worker    a Target, once; then chunks: lists of the pickled keyword arguments of calls
    worker -> pool    Ready or LoadFailure, once; then one result as each call ends

The reward function does not share the socket: its number is high and not 0, 1 or 2, programs that the function starts do not inherit it,
and a fork of this process closes it. A fork that returns from the function ends there, so only the worker itself answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import io
import json
import math
import numbers
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hone.errors import NoVerdict, did_you_mean
from hone.insight import activity
from hone.insight.redaction import redact_text
from hone.rewards.frames import MAX_ANSWER, Channel
from hone.rewards.score import Cause, Score
from hone.text import valid_data, valid_text
from hone.user_code import UserCodeError, last_line, load_file, place_of

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


_FIRST_DESCRIPTOR = 100
_PARENT_SECONDS = 1.0


def main() -> None:
    """Serve the pool until it closes the connection; exit with :data:`BROKEN` if the worker itself fails."""
    try:
        _serve()
    except Exception:  # noqa: BLE001 - errors of reward functions are caught where they are called
        traceback.print_exc()
        os._exit(BROKEN)


def _serve() -> None:
    channel = _open_channel(int(sys.argv[1]), bytes.fromhex(sys.argv[2]))
    _end_with_pool(channel)
    _show_output_at_once()
    target: Target = pickle.loads(_receive(channel))
    if len(sys.argv) > 3:
        activity.begin(Path(sys.argv[3]), "reward worker", os.getpid())
    try:
        with activity.doing("loading the reward function"):
            function, is_async = _load(target)
    except LoadFailure as failure:
        _send(channel, failure.encode())
        return
    _send(channel, Ready(is_async).encode())
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    while True:
        payloads: list[bytes] = pickle.loads(_receive(channel))
        with activity.doing(f"{len(payloads)} calls"):
            if is_async:
                loop.run_until_complete(_run_together(channel, function, payloads, target))
            else:
                for number, payload in enumerate(payloads):
                    _reply(channel, number, *_run_one(function, payload, loop, target))


# ------------------------------------------------------------------------------------------------------------- channel


def _open_channel(descriptor: int, nonce: bytes) -> Channel:
    """Return the channel on a descriptor that the reward function is unlikely to touch and its children do not have."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    os.close(descriptor)
    channel = Channel(socket.socket(fileno=moved), nonce)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def _receive(channel: Channel) -> bytes:
    """Return the next message of the pool; end with it."""
    _end_if_forked(channel)
    try:
        body = channel.receive()
    except EOFError:
        _end()
    assert body is not None  # there is no time limit
    return body


def _send(channel: Channel, body: bytes) -> None:
    """Send a message to the pool; end with it."""
    _end_if_forked(channel)
    try:
        channel.send(body)
    except ConnectionError:
        _end()


def _end_if_forked(channel: Channel) -> None:
    """End a copy of the worker that a reward function made and that returned from it."""
    if os.getpid() != channel.pid:
        os._exit(0)


def _end() -> NoReturn:
    """End this process and all processes that the reward function left in its session, without a word."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _end_with_pool(channel: Channel) -> None:
    """End when the pool's process ends, even if it was killed while a reward function still runs here."""
    parent, poll = os.getppid(), select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)

    def watch() -> None:
        while os.getppid() == parent:
            for _, event in poll.poll(_PARENT_SECONDS * 1000):
                if event & select.POLLNVAL:  # the reward function closed the channel
                    os._exit(BROKEN)
                _end()
        _end()

    threading.Thread(target=watch, name="watch the pool", daemon=True).start()


def _show_output_at_once() -> None:
    """Write each line as it is printed, since the process may be killed, and any text, valid or not."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


# ------------------------------------------------------------------------------------------------------------- loading


def _load(target: Target) -> tuple[Callable[..., Any], bool]:
    """Load the function to call; also return whether it is asynchronous."""
    if target.path is None:
        return _load_scorers(target.scorers), False
    if target.code is not None:
        function = _load_code(target.code, target.path)
    else:
        function = _load_from_file(target)
    adapted = Adapted(function, target.kwargs, batch=target.batch)
    if not adapted.by_columns:
        _check_signature(function, target, adapted.arguments)
    return adapted, adapted.is_async


def _load_code(code: bytes, name: str) -> Callable[..., Any]:
    """Load a function that the pool's process pickled."""
    try:
        return pickle.loads(code)
    except Exception as error:  # loading imports the modules that the function uses
        raise LoadFailure(
            f"the function '{name}' cannot be loaded in a worker process: {last_line(error)}",
            "import modules inside the function, or put it into a file",
            traceback.format_exc(),
        ) from error


def _load_from_file(target: Target) -> Callable[..., Any]:
    module = _load_module(Path(str(target.path)))
    function = getattr(module, target.name, None)
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if function is None:
        raise LoadFailure(
            f"{target.path} has no function '{target.name}'",
            f"reward.custom_reward_function.name=<function>. {did_you_mean(target.name, functions)}",
        )
    if not callable(function):
        raise LoadFailure(
            f"'{target.name}' of {target.path} is a {type(function).__name__}, not a function", target.signature
        )
    return function


def _load_module(path: Path) -> Any:
    try:
        return load_file(path)
    except UserCodeError as error:
        raise LoadFailure(error.what, error.fix, error.trace) from error


def _check_signature(function: Callable[..., Any], target: Target, arguments: Sequence[str]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **target.kwargs)
    except TypeError as error:
        given = ", ".join([*arguments, *target.kwargs])
        raise LoadFailure(
            f"'{target.name}' of {target.path} cannot be called with {given}: {error}", target.signature
        ) from error
    except ValueError:
        return  # a builtin without a signature; the first call reports a mismatch


def _load_scorers(names: tuple[str, ...]) -> Callable[..., Any]:
    from hone.rewards.scorers import SCORERS

    for name in names:
        SCORERS.get(name).prepare()

    def call(scorer: str, **arguments: Any) -> Any:
        return SCORERS.get(scorer).compute(**arguments)

    return call


# ------------------------------------------------------------------------------------------------------------- calling


def _run_one(
    function: Callable[..., Any], payload: bytes, loop: asyncio.AbstractEventLoop, target: Target
) -> tuple[Score | list[Score], str | None]:
    begun, call = time.monotonic(), {}
    try:
        call = pickle.loads(payload)
        value = function(**call)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(asyncio.wait_for(value, target.timeout))
        return target.read(value, call), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a reward function is counted
        return _failure(error, time.monotonic() - begun, target.timeout, call)


async def _run_together(channel: Channel, function: Callable[..., Any], payloads: list[bytes], target: Target) -> None:
    async def run(number: int, payload: bytes) -> None:
        begun, call = time.monotonic(), {}
        try:
            call = pickle.loads(payload)
            value = await asyncio.wait_for(function(**call), target.timeout)
            outcome = target.read(value, call), None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - see above
            outcome = _failure(error, time.monotonic() - begun, target.timeout, call)
        _reply(channel, number, *outcome)

    await asyncio.gather(*(run(number, payload) for number, payload in enumerate(payloads)))


def _failure(error: BaseException, seconds: float, timeout: float, call: dict[str, Any]) -> tuple[Score, str | None]:
    if isinstance(error, TimeoutError) and seconds >= timeout:
        return failed(f"timeout: no answer within {timeout:g} s", Cause.TIMEOUT), None
    rows = [call.get("extra_info"), *(call.get("extra_infos") or [])]
    names = dict.fromkeys(name for row in rows for name in row or {} if isinstance(error, KeyError))
    score = failed_by(error, last_line(error) + place_of(error) + (HAVE + ", ".join(names)) * bool(names))
    return score, redact_text("".join(traceback.format_exception(error))) if score.cause is Cause.RAISED else None


def _reply(channel: Channel, number: int, score: Score | list[Score], trace: str | None) -> None:
    try:
        body = encode_result(number, score, trace)
    except (ValueError, TypeError, RecursionError) as error:
        body = encode_result(number, failed(f"returned what cannot be sent: {last_line(error)}"), None)
    _send(channel, body)
    activity.tick()


if __name__ == "__main__":
    main()

"""Worker process that loads one reward function and runs the calls that the parent sends.

Its arguments are the number of an inherited file descriptor, over which it communicates, and the folder in which the run's
processes publish their activity. Standard output remains for the reward function. It starts as a new program, not by fork: it has no
locks or threads of the trainer, and a script without ``if __name__ == "__main__"`` does not run twice.

    parent -> worker    a Target, once; then chunks: lists of (number, pickled keyword arguments)
    worker -> parent    Ready or LoadFailure, once; then (number, Score, traceback or None) as each call ends, and a list of
                        scores from a function that scores a batch
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hone.errors import did_you_mean
from hone.insight import activity
from hone.rewards.outcome import TIMEOUT, failed, to_score, to_scores
from hone.rewards.score import Score

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
PLURALS = tuple(f"{name}s" for name in ARGUMENTS)


@dataclass(frozen=True)
class Target:
    """Function or scorers that a worker calls.

    Attributes:
        timeout: seconds per call (asynchronous calls are cancelled here; the parent kills the worker for others).
        path: file of a reward function; None for the built-in scorers.
        name: name of the function in the file.
        kwargs: additional keyword arguments of every call.
        scorers: built-in scorers to prepare.
        batch: True if a call scores many responses: arguments and return value are lists.
    """

    timeout: float
    path: str | None = None
    name: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
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

    def read(self, value: Any, call: dict[str, Any]) -> Score | list[Score]:
        """Convert a call's return value to a score, or to the scores of a batch."""
        return to_scores(value, len(call[PLURALS[0]])) if self.batch else to_score(value)


@dataclass(frozen=True)
class Ready:
    """Message that the function is loaded."""

    is_async: bool


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


def main() -> None:
    """Serve the parent until it closes the connection."""
    _exit_with_parent()
    connection = Connection(int(sys.argv[1]))
    target: Target = connection.recv()
    if len(sys.argv) > 2:
        activity.begin(Path(sys.argv[2]), "reward worker", os.getpid())
    try:
        with activity.doing("loading the reward function"):
            function, is_async = _load(target)
    except LoadFailure as failure:
        connection.send(failure)
        return
    connection.send(Ready(is_async))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    while True:
        try:
            chunk: list[tuple[int, bytes]] = connection.recv()
        except EOFError:
            return
        with activity.doing(f"{len(chunk)} calls"):
            if is_async:
                loop.run_until_complete(_run_together(connection, function, chunk, target))
            else:
                for number, payload in chunk:
                    _reply(connection, number, *_run_one(function, payload, loop, target))


# ------------------------------------------------------------------------------------------------------------- loading


def _load(target: Target) -> tuple[Callable[..., Any], bool]:
    """Load the function to call; also return whether it is asynchronous."""
    if target.path is None:
        return _load_scorers(target.scorers), False
    module = _load_module(Path(target.path))
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
    _check_signature(function, target)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return functools.partial(function, **target.kwargs), is_async


def _load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LoadFailure(f"{path} is not a Python file", "reward.custom_reward_function.path=<file>.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's file is reported to the parent
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" at line {lines[-1]}" if lines else ""
        raise LoadFailure(
            f"importing {path} failed{line}: {_last_line(error)}", "fix the file", traceback.format_exc()
        ) from error
    return module


def _check_signature(function: Callable[..., Any], target: Target) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(target.arguments), **target.kwargs)
    except TypeError as error:
        given = ", ".join([*target.arguments, *target.kwargs])
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
    begun = time.monotonic()
    try:
        call = pickle.loads(payload)
        value = function(**call)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(asyncio.wait_for(value, target.timeout))
        return target.read(value, call), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a reward function is counted
        return _failure(error, time.monotonic() - begun, target.timeout)


async def _run_together(
    connection: Connection, function: Callable[..., Any], chunk: list[tuple[int, bytes]], target: Target
) -> None:
    async def run(number: int, payload: bytes) -> None:
        begun = time.monotonic()
        try:
            call = pickle.loads(payload)
            value = await asyncio.wait_for(function(**call), target.timeout)
            outcome = target.read(value, call), None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - see above
            outcome = _failure(error, time.monotonic() - begun, target.timeout)
        _reply(connection, number, *outcome)

    await asyncio.gather(*(run(number, payload) for number, payload in chunk))


def _failure(error: BaseException, seconds: float, timeout: float) -> tuple[Score, str | None]:
    if isinstance(error, TimeoutError) and seconds >= timeout:
        return failed(f"{TIMEOUT}: no answer within {timeout:g} s"), None
    return failed(_last_line(error)), "".join(traceback.format_exception(error))


def _last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _reply(connection: Connection, number: int, score: Score | list[Score], trace: str | None) -> None:
    connection.send((number, score, trace))
    activity.tick()


def _exit_with_parent() -> None:
    """End with the parent, even if it was killed while a reward function still runs here."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()

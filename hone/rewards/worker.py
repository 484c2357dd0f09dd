"""Worker process that loads one reward function and runs the calls that the pool sends.

Its arguments are the number of an inherited socket, its nonce, and the folder in which the run's processes publish their activity. It
starts as a new program, not by fork: it has no locks or threads of the trainer, and a script without ``if __name__ == "__main__"`` does
not run twice.

    pool -> worker    a Target, once; then chunks: lists of the pickled keyword arguments of calls
    worker -> pool    Ready or LoadFailure, once; then one result as each call ends (hone/rewards/target.py)

The reward function does not share the socket: its number is high and not 0, 1 or 2, programs that the function starts do not inherit it,
and a fork of this process closes it. A fork that returns from the function ends there, so only the worker itself answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import io
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hone.errors import did_you_mean
from hone.insight import activity
from hone.insight.redaction import redact_text
from hone.rewards.frames import Channel
from hone.rewards.score import Cause, Score
from hone.rewards.target import BROKEN, HAVE, Adapted, LoadFailure, Ready, Target, encode_result, failed, failed_by
from hone.user_code import UserCodeError, last_line, load_file, place_of

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

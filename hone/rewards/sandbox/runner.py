"""Runs programs in the sandbox: bounded, many at a time, from synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from hone.rewards.sandbox.backends import Backend, choose
from hone.rewards.sandbox.limits import Ending, Limits, Result

MAIN = "main.py"
"""Name of the program's own file, in its folder."""
GRACE = 30.0
"""Seconds beyond the limit that a supervisor gets to start and to end everything."""
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class Sandbox:
    """Runs Python programs that nobody has read.

    >>> import asyncio
    >>> result = asyncio.run(Sandbox(backend="process").run("print(input() * 2)", stdin="ab"))
    >>> result.ending.value, result.stdout
    ('finished', 'abab\\n')

    Args:
        backend: ``auto`` (the strongest that works), ``bubblewrap`` or ``process``.
        limits: of each program, unless its call has others.
        max_concurrent: programs at one time; more wait.

    Raises:
        ConfigError: the backend does not work here.
    """

    def __init__(self, *, backend: str = "auto", limits: Limits | None = None, max_concurrent: int = 8) -> None:
        self.backend, self.limits = choose(backend), limits or Limits()
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox")

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run a Python program; what goes wrong in it is in the result.

        Args:
            code: the program.
            stdin: its standard input.
            files: further files, by their path in its working folder.
            limits: others than the sandbox's.

        Raises:
            ValueError: a path leads out of the folder.
        """
        call = partial(execute, self.backend, code, stdin, dict(files or {}), limits or self.limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def run_sync(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """As :meth:`run`, for code that is not asynchronous."""
        return self._threads.submit(
            execute, self.backend, code, stdin, dict(files or {}), limits or self.limits
        ).result()

    def close(self) -> None:
        """Wait for the programs that run; those that wait are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)


_default: Sandbox | None = None
_lock = threading.Lock()


async def run(
    code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
) -> Result:
    """Run a program in this process's own sandbox, made when it is first needed; see :meth:`Sandbox.run`."""
    global _default
    with _lock:
        _default = _default or Sandbox()
    return await _default.run(code, stdin=stdin, files=files, limits=limits)


def execute(backend: Backend, code: str, stdin: str, files: dict[str, str], limits: Limits) -> Result:
    """Run one program under a supervisor of its own, and wait for it."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or name == MAIN or "\x00" in name:
            raise ValueError(f"'{name}' is no path inside the program's folder (other than {MAIN})")
    request = json.dumps(backend.request(limits, stdin, {**files, MAIN: code}, MAIN))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    watchdog = threading.Timer(limits.seconds + GRACE, process.kill)
    watchdog.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()  # left open: the supervisor lives as long as somebody holds it
        answer, said = process.stdout.read(), process.stderr.read()
    finally:
        watchdog.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code_of = process.wait()
        process.stdout.close()
        process.stderr.close()
    return _result(answer, said, code_of)


def _result(answer: bytes, said: bytes, code: int) -> Result:
    try:
        found: dict[str, Any] = json.loads(answer)
    except json.JSONDecodeError:
        last = (said.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        return Result(Ending.BROKEN, error=f"the supervisor ended with exit code {code} and said: {last}")
    texts = {
        name: base64.b64decode(found.pop(name, "")).decode("utf-8", errors="replace") for name in ("stdout", "stderr")
    }
    return Result(Ending(found.pop("ending")), **texts, **found)

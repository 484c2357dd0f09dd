"""Running programs in the sandbox with bounded concurrency, from synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hone.rewards.sandbox.backends import execute
from hone.rewards.sandbox.choice import choose
from hone.rewards.sandbox.limits import Limits, Result


class Sandbox:
    """Sandbox for untrusted Python programs.

    >>> import asyncio
    >>> result = asyncio.run(Sandbox(backend="process").run("print(input() * 2)", stdin="ab"))
    >>> result.ending.value, result.stdout
    ('finished', 'abab\\n')

    Args:
        backend: ``auto`` (the strongest that works), ``bubblewrap`` or ``process``.
        require: names of protections that the backend must give: ``network``, ``files``, ``processes``, ``memory``, ``disk``.
        max_concurrent: maximum concurrent programs; further ones wait.

    Raises:
        ConfigError: the backend does not work here, or lacks a required protection.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        require: Sequence[str] = (),
        limits: Limits | None = None,
        max_concurrent: int = 8,
    ) -> None:
        self.backend, self.limits = choose(backend, require), limits or Limits()
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="sandbox")

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run a Python program; failures of the program are in the result.

        ``files``: text of additional files by path in the working folder.

        Raises ValueError: a path is outside of the folder.
        """
        call = partial(execute, self.backend, code, stdin, dict(files or {}), limits or self.limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def run_sync(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run a program like :meth:`run`, from synchronous code."""
        return self._threads.submit(
            execute, self.backend, code, stdin, dict(files or {}), limits or self.limits
        ).result()

    def close(self) -> None:
        """Wait for running programs; drop waiting ones."""
        self._threads.shutdown(wait=True, cancel_futures=True)


_default: Sandbox | None = None
_lock = threading.Lock()


async def run(
    code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
) -> Result:
    """Run a program in this process's default sandbox, created on first use; see :meth:`Sandbox.run`."""
    global _default
    with _lock:
        _default = _default or Sandbox()
    return await _default.run(code, stdin=stdin, files=files, limits=limits)

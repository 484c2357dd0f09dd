"""Running programs in the sandbox with bounded concurrency, from synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hone.errors import ConfigError
from hone.rewards.sandbox.backends import PROTECTIONS, Backend, execute
from hone.rewards.sandbox.limits import Limits, Result
from hone.rewards.sandbox.system_calls import landlock_version, system_call_filter

logger = logging.getLogger("hone.rewards")


def choose(requested: str, required: Sequence[str] = ()) -> Backend:
    """Return the requested backend, or with ``auto`` the strongest that works; warn once about a weak one.

    Args:
        requested: ``auto``, ``bubblewrap``, or ``process`` (as another user if this is root).
        required: names of :data:`~hone.rewards.sandbox.backends.PROTECTIONS` that it must give.

    Raises:
        ConfigError: the requested backend does not work here, or does not give what is required.
    """
    working, missing = available()
    names = {"auto": ("bubblewrap", "user", "process"), "process": ("user", "process")}.get(requested, (requested,))
    backend = next((working[name] for name in names if name in working), None)
    if backend is None:
        raise ConfigError(
            f"the sandbox backend {requested} does not work here: {missing.get(requested, 'unknown backend')}",
            why="model-written code could access this machine",
            fix="apt-get install bubblewrap, or use reward.sandbox.backend=auto",
            where="reward.sandbox.backend",
        )
    lacking = [name for name in required if name in backend.unprotected]
    if lacking:
        raise ConfigError(
            f"the sandbox backend {backend.name} does not protect {', '.join(lacking)} here",
            why=f"programs can reach {'; '.join(PROTECTIONS[name] for name in lacking)}",
            fix=f"install bubblewrap ({missing.get('bubblewrap', 'it works here')}), or remove these names from the list",
            where="reward.sandbox.require",
        )
    _say(backend, missing.get("bubblewrap", ""))
    return backend


@functools.cache
def _say(backend: Backend, reason: str) -> None:
    logger.info("the sandbox for code is %s; memory is bounded by %s", backend.name, backend.memory_bound)
    if backend.unprotected:
        logger.warning(
            "the sandbox for code is weak here (%s%s). Programs can access: %s",
            *(backend.name, reason and f"; bubblewrap: {reason}"),
            "; ".join(PROTECTIONS[name] for name in backend.unprotected),
        )


@functools.cache
def available() -> tuple[dict[str, Backend], dict[str, str]]:
    """Return the working backends, each tried with a program, and why the others do not work."""
    working: dict[str, Backend] = {}
    missing: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return working, dict.fromkeys(("bubblewrap", "user", "process"), "it needs Linux")
    pythons = [sys.executable]
    names = ["bubblewrap", "process"]
    if os.geteuid() == 0:  # another user may not be allowed to read the interpreter in use
        pythons.append(shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable)
        names.insert(1, "user")
    version = landlock_version()
    candidates = [
        Backend(name, python, filtered, landlock, cgroup)
        for name in names
        for python in dict.fromkeys(pythons if name == "user" else pythons[:1])
        for filtered in ((True, False) if system_call_filter(sockets=True) else (False,))
        for landlock in ((version, 0) if version and name != "bubblewrap" else (0,))
        for cgroup in (*_cgroups(), "")
    ]
    for backend in candidates:
        if backend.name not in working:
            failure = _failure(backend)
            if failure:
                missing[backend.name] = failure
            else:
                working[backend.name] = backend
    return working, {name: failure for name, failure in missing.items() if name not in working}


def _cgroups() -> list[str]:
    """Return the nearest control group (version 2) that bounds memory and in which this user may make others, if any."""
    with contextlib.suppress(OSError):
        current = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
        mounts = [
            line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line
        ]
        for root, point in (mount[3:5] for mount in mounts):
            here = Path(point, os.path.relpath(current, root))
            for folder in (here, *here.parents):
                control = folder / "cgroup.subtree_control"
                if control.exists() and {"memory", "pids"} <= set(control.read_text().split()):
                    return [str(folder)] if os.access(folder, os.W_OK) else []
    return []


def _failure(backend: Backend) -> str:
    """Return why a backend does not work, or an empty text."""
    if backend.name == "bubblewrap":
        path = shutil.which("bwrap")
        if path is None:
            return "the program bwrap is not installed"
        usage = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=10)
        if "--size" not in usage.stdout:
            return "bwrap is older than 0.7"
        if shutil.which("prlimit") is None or shutil.which("setpriv") is None:
            return "prlimit or setpriv (of util-linux) is not installed"
    result = execute(backend, "print(6 * 7)", "", {}, Limits(seconds=20.0))
    if not result.succeeded:
        return (result.error or result.stderr or f"exit code {result.exit_code}").strip().splitlines()[-1]
    return "" if result.stdout == "42\n" else "a program printed something else"


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

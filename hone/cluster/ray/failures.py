"""What really happened when Ray says that a call failed: the root cause, never a wrapper.

A rank that dies makes its peers fail too (their collective breaks, what it had stored is gone), and those often speak first. So
when an error may be the echo of a death, the other ranks get a moment to say theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from hone.cluster.failures import is_out_of_memory, log_tail, out_of_memory, worker_lost
from hone.config.tree import RLConfig
from hone.errors import HoneError, ProcessError
from hone.insight import activity
from hone.insight.activity import Record, read_records
from hone.insight.environment import oom_kills

GRACE = 10.0
"""Seconds in which the other ranks of a failed call may say why."""

_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, OutOfMemoryError)
_BROKEN_COLLECTIVE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|gloo|nccl|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)
_MARKS = (":job_id:", ":actor_name:", ":task_name:", "Extension modules: ", "[20")
"""Lines that Ray and the interpreter write into the logs of workers, which say nothing about their work."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Post:
    """Whom a call went to.

    Attributes:
        name: of the process, ``pool[rank]``.
        ref: its answer under way.
    """

    name: str
    ref: Any


class Failures:
    """Explains failed calls of one run.

    Args:
        config: of the run.
        folder: where its processes publish what they do.
    """

    def __init__(self, config: RLConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._oom_kills = oom_kills()

    def answers(self, posts: Sequence[Post], timeout: float | None = None) -> list[Any]:
        """Wait for answers; what goes wrong is raised as it was at its root."""
        try:
            return ray.get([post.ref for post in posts], timeout=timeout)
        except RayError as error:
            raise self.explain(posts, error) from None

    def explain(self, posts: Sequence[Post], first: BaseException) -> BaseException:
        """The error to raise for a call that failed.

        Args:
            posts: whom the call went to.
            first: what was heard first.

        Returns:
            A :class:`~hone.cluster.failures.WorkerLost` where a process died, the user's own mistake where there is one,
            else the exception as it was raised in the worker, with its traceback there as a note.
        """
        if isinstance(first, GetTimeoutError):
            return self._late(posts)
        heard = self._hear(posts, GRACE if may_be_echo(first) else 0.0) or {posts[0].name: first}
        ranked = sorted(heard.items(), key=lambda item: _rank(item[1]))
        name, error = ranked[0]
        if _is_lost(root(error)):
            return self._lost(name, error)
        return self._raised(name, error)

    def _hear(self, posts: Sequence[Post], seconds: float) -> dict[str, BaseException]:
        """What has become of a call at every rank that failed at it."""
        done, _ = ray.wait([post.ref for post in posts], num_returns=len(posts), timeout=seconds)
        heard: dict[str, BaseException] = {}
        for post in posts:
            if post.ref in done:
                try:
                    ray.get(post.ref)
                except Exception as error:  # noqa: BLE001 - all kinds are looked at, and the worst of them is raised
                    heard[post.name] = error
        return heard

    def _late(self, posts: Sequence[Post]) -> BaseException:
        done, _ = ray.wait([post.ref for post in posts], num_returns=len(posts), timeout=0)
        missing = [post.name for post in posts if post.ref not in done]
        return ProcessError(
            f"{', '.join(missing)} did not start within {self._config.ray.start_timeout:g} s (ray.start_timeout)",
            why="a node may be gone or overloaded, or its devices taken; every saved checkpoint is intact",
            fix="look at `ray status`; then the same command again, with fewer workers or a larger ray.start_timeout",
        )

    def _lost(self, name: str, error: BaseException) -> BaseException:
        """A process is gone: the one that the call went to, or the one that had stored what it needed."""
        records = {record.name: record for record in read_records(self._folder)}
        if not isinstance(root(error), RayActorError):
            dead = [other for other, record in records.items() if not record.is_alive()]
            name = dead[0] if dead else name
        record = records.get(name)
        log = log_tail(Path(record.log), without=_MARKS) if record and record.log and record.is_here() else ""
        memory = self._for_memory(error)
        return worker_lost(
            name,
            record,
            _cause(error, log, memory),
            config=self._config,
            run_stage=_stage(records),
            out_of_memory=memory,
            log=log,
        )

    def _for_memory(self, error: BaseException) -> bool:
        """Whether the kernel, or Ray's own monitor, killed for memory."""
        text = str(error)
        return isinstance(root(error), OutOfMemoryError) or "low on memory" in text or oom_kills() > self._oom_kills

    def _raised(self, name: str, error: BaseException) -> BaseException:
        """An exception in a worker, without Ray's wrapping."""
        cause = root(error)
        if isinstance(cause, HoneError):
            return cause
        if _never_began(cause):
            return _could_not_begin(name, cause)
        if is_out_of_memory(cause):
            records = {record.name: record for record in read_records(self._folder)}
            return out_of_memory(cause, self._config, f"{_stage(records)} > {name}: {activity.stage_of(cause)}")
        if isinstance(error, RayTaskError):
            cause.add_note(f"It was raised in {name}:\n{remote_traceback(error)}")
        return cause


def _stage(records: Mapping[str, Record]) -> str:
    """What the run is in the middle of, as its driver says, without the wait for the call that failed."""
    driver = records.get("driver")
    return " > ".join(span.what for span in driver.spans if not span.waits) if driver else ""


def may_be_echo(error: BaseException) -> bool:
    """Whether an error may only follow from the death of another process."""
    cause = root(error)
    return _is_lost(cause) or (
        not isinstance(cause, HoneError) and _BROKEN_COLLECTIVE.search(f"{type(cause)} {cause}") is not None
    )


def root(error: BaseException) -> BaseException:
    """What is inside of Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def remote_traceback(error: RayTaskError) -> str:
    """The traceback as it was in the worker."""
    return plain(str(error))


def plain(text: str) -> str:
    """What Ray wrote, without its colours, its own headings and the marks under lines."""
    lines = _ANSI.sub("", text).rstrip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("ray::") and not re.fullmatch(r"\s*\^+\s*", line))


def _is_lost(cause: BaseException) -> bool:
    return isinstance(cause, _LOST) and not _never_began(cause)


def _never_began(cause: BaseException) -> bool:
    """Whether the process was there, but could not import what it needs."""
    return isinstance(cause, RayActorError) and "error raised in its creation task" in str(cause)


def _could_not_begin(name: str, cause: BaseException) -> ProcessError:
    lines = [line for line in plain(str(cause)).splitlines() if line.strip()]
    return ProcessError(
        f"{name} could not begin: {lines[-1].strip()}\n" + "\n".join(f"    {line}" for line in lines[-12:-1]),
        why="every worker must be able to import what the driver imports",
        fix="install the same environment on every node, or name it in ray.runtime_env",
    )


def _rank(error: BaseException) -> int:
    """The order of root causes: the user's mistake, a death, any other exception, an echo."""
    cause = root(error)
    if isinstance(cause, HoneError):
        return 0
    if isinstance(cause, RayActorError):
        return 1
    if _is_lost(cause):
        return 2
    return 4 if may_be_echo(error) or isinstance(cause, RayError) else 3


def _cause(error: BaseException, log: str, for_memory: bool) -> str:
    """How a process ended, in words."""
    if for_memory:
        return "was killed because memory ran out"
    if "SIGSEGV" in log or "Segmentation fault" in log:
        return "crashed (segmentation fault)"
    if "node" in str(error) and (
        "node died" in str(error) or "node is dead" in str(error) or "node has died" in str(error)
    ):
        return "is lost with its node"
    code = re.search(r"exit code (-?\d+)", str(error))
    return f"ended with exit code {code[1]}" if code else "was killed"

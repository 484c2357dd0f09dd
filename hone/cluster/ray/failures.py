"""Find the root cause of a call that Ray reports as failed.

A rank that dies makes its peers fail too (their collective breaks, their inputs are lost), and those often report first. If
an error may be such a consequence, the other ranks therefore get a moment to report theirs.
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

from hone.cluster.failures import is_broken_collective, is_out_of_memory, log_tail, out_of_memory, worker_lost
from hone.config.trees import AnyConfig
from hone.errors import HoneError, ProcessError
from hone.insight import activity
from hone.insight.activity import Record, read_records
from hone.insight.environment import oom_kills

GRACE = 10.0
"""Seconds that the other ranks of a failed call have to report their errors."""

_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, OutOfMemoryError)
_MARKS = (":job_id:", ":actor_name:", ":task_name:", "Extension modules: ", "[20")
"""Lines of Ray and the interpreter in workers' logs, which carry no information about their work."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class PendingCall:
    """A call to one process.

    Attributes:
        name: name of the process, ``pool[rank]``.
        ref: its pending result.
    """

    name: str
    ref: Any


class Failures:
    """Explain failed calls of one run.

    Args:
        folder: directory of the processes' activity records.
    """

    def __init__(self, config: AnyConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._oom_kills = oom_kills()

    def answers(self, calls: Sequence[PendingCall], timeout: float | None = None) -> list[Any]:
        """Wait for results; errors are raised with their root cause."""
        try:
            return ray.get([call.ref for call in calls], timeout=timeout)
        except RayError as error:
            raise self.explain(calls, error) from None

    def explain(self, calls: Sequence[PendingCall], first: BaseException) -> BaseException:
        """Return the error to raise for a failed call.

        Args:
            calls: calls to the processes.
            first: first reported error.

        Returns:
            A :class:`~hone.cluster.failures.WorkerLost` if a process died, the user's mistake if there is one, else the
            exception as raised in the worker, with its traceback there as a note.
        """
        if isinstance(first, GetTimeoutError):
            return self._late(calls)
        errors = self._errors_by_rank(calls, GRACE if may_be_echo(first) else 0.0) or {calls[0].name: first}
        ranked = sorted(errors.items(), key=lambda item: _rank(item[1]))
        name, error = ranked[0]
        if _is_lost(root(error)):
            return self._lost(name, error)
        return self._raised(name, error)

    def _errors_by_rank(self, calls: Sequence[PendingCall], seconds: float) -> dict[str, BaseException]:
        """Return the error of a call at every rank that failed."""
        done, _ = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=seconds)
        errors: dict[str, BaseException] = {}
        for call in calls:
            if call.ref in done:
                try:
                    ray.get(call.ref)
                except Exception as error:  # noqa: BLE001 - all kinds are examined, and the root cause is raised
                    errors[call.name] = error
        return errors

    def _late(self, calls: Sequence[PendingCall]) -> BaseException:
        done, _ = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=0)
        missing = [call.name for call in calls if call.ref not in done]
        return ProcessError(
            f"{', '.join(missing)} did not start within {self._config.ray.start_timeout:g} s (ray.start_timeout)",
            why="a node may be gone or overloaded, or its devices in use; every saved checkpoint is intact",
            fix="check `ray status`; then run the same command again, with fewer workers or a larger ray.start_timeout",
        )

    def _lost(self, name: str, error: BaseException) -> BaseException:
        """Return the error for a lost process: the called one, or the one that stored its inputs."""
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
        """Return whether the kernel, or Ray's memory monitor, killed for memory."""
        text = str(error)
        return isinstance(root(error), OutOfMemoryError) or "low on memory" in text or oom_kills() > self._oom_kills

    def _raised(self, name: str, error: BaseException) -> BaseException:
        """Return an exception of a worker, without Ray's wrapping."""
        cause = root(error)
        if isinstance(cause, HoneError):
            return cause
        if _never_began(cause):
            return _import_failed(name, cause)
        if is_out_of_memory(cause):
            records = {record.name: record for record in read_records(self._folder)}
            return out_of_memory(cause, self._config, f"{_stage(records)} > {name}: {activity.stage_of(cause)}")
        if isinstance(error, RayTaskError):
            cause.add_note(f"It was raised in {name}:\n{plain(str(error))}")
        return cause


def _stage(records: Mapping[str, Record]) -> str:
    """Return the driver's current stage, without its wait for the failed call."""
    driver = records.get("driver")
    return " > ".join(span.what for span in driver.spans if not span.waits) if driver else ""


def may_be_echo(error: BaseException) -> bool:
    """Return whether an error may be a consequence of the death of another process."""
    cause = root(error)
    return _is_lost(cause) or is_broken_collective(cause)


def root(error: BaseException) -> BaseException:
    """Return the error inside Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def plain(text: str) -> str:
    """Return Ray's text without colours, headings and the marks below lines."""
    lines = _ANSI.sub("", text).rstrip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("ray::") and not re.fullmatch(r"\s*\^+\s*", line))


def _is_lost(cause: BaseException) -> bool:
    return isinstance(cause, _LOST) and not _never_began(cause)


def _never_began(cause: BaseException) -> bool:
    """Return whether the process existed, but could not import its packages."""
    return isinstance(cause, RayActorError) and "error raised in its creation task" in str(cause)


def _import_failed(name: str, cause: BaseException) -> ProcessError:
    lines = [line for line in plain(str(cause)).splitlines() if line.strip()]
    return ProcessError(
        f"{name} could not start: {lines[-1].strip()}\n" + "\n".join(f"    {line}" for line in lines[-12:-1]),
        why="every worker must be able to import what the driver imports",
        fix="install the same environment on every node, or name it in ray.runtime_env",
    )


def _rank(error: BaseException) -> int:
    """Return the order of root causes: the user's mistake, a death, any other exception, a consequence."""
    cause = root(error)
    if isinstance(cause, HoneError):
        return 0
    if isinstance(cause, RayActorError):
        return 1
    if _is_lost(cause):
        return 2
    return 4 if may_be_echo(error) or isinstance(cause, RayError) else 3


def _cause(error: BaseException, log: str, for_memory: bool) -> str:
    """Return how a process ended, in words."""
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

"""Append-only log of tool calls: who called what, when, and how it ended.

    <folder>/<host>-<process>-<time>.jsonl     one file for each process that executes or serves calls
    <folder>/<host>-<process>-<time>.head      number and hash of its last line
    <folder>/files                             names of all of them

A line is written before a call begins and another one after it has ended, so that a call that was killed is there too. Every line has
the SHA-256 of the line before it. A changed, removed or inserted line therefore breaks the chain, and the head tells of the last ones.
After a kill the head may lack one line. A user who can write all three files can forge a log: copy it to where they cannot. Results are hashed, not stored; known secrets in arguments are hidden.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.insight.redaction import redact_tree
from hone.insight.run_files import now

_HEAD, _FILES = ".head", "files"
FIRST = "0" * 64  # hash before the first line


class AuditLog:
    """Writer of one file; threads may share it.

    Raises HoneError: the folder cannot be written: a call that cannot be recorded must not happen.
    """

    def __init__(self, folder: str | Path) -> None:
        name = f"{platform.node()}-{os.getpid()}-{time.time_ns()}.jsonl"
        self.path = Path(folder).expanduser() / name
        self._lock, self._numbers, self._before = threading.Lock(), itertools.count(1), FIRST
        self._lines = itertools.count(1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            self._head = os.open(
                self.path.with_suffix(_HEAD), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            with (self.path.parent / _FILES).open("a", encoding="utf-8") as files:
                files.write(f"{name}\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def begin(self, tool: str, arguments: Any, **about: Any) -> int:
        """Record that a call begins; return its number.

        Args:
            tool: name that the model wrote.
            arguments: arguments, or the text that could not be parsed.
            about: names of the episode or session, and what else identifies the caller.

        Raises:
            HoneError: the line cannot be written.
        """
        number = next(self._numbers)
        self._write({"event": "call", "call": number, "tool": tool, "arguments": redact_tree(arguments), **about})
        return number

    def end(self, call: int, status: str, result: str, seconds: float) -> None:
        """Record how a call ended. Raises HoneError: the line cannot be written."""
        digest = hashlib.sha256(result.encode(errors="replace")).hexdigest()
        ended = {"status": status, "seconds": round(seconds, 4), "result_sha256": digest, "characters": len(result)}
        self._write({"event": "end", "call": call, **ended})

    def served(self, tool: str, arguments: Any, **about: Any) -> None:
        """Record a call that a served model made, and that its client executes.

        Raises HoneError: the line cannot be written.
        """
        call = {"event": "served", "call": next(self._numbers), "tool": tool, "arguments": redact_tree(arguments)}
        self._write({**call, **about})

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            line = json.dumps({"at": now(), **record, "before": self._before}, ensure_ascii=False, default=str)
            encoded = line.encode(errors="replace") + b"\n"
            try:
                if os.write(self._file, encoded) < len(encoded):
                    raise OSError(errno.ENOSPC, "only a part of the line was written")
                digest = hashlib.sha256(encoded).hexdigest()
                os.pwrite(self._head, f"{next(self._lines):>12} {digest}\n".encode(), 0)
            except OSError as error:
                raise _unwritable(self.path, error) from error
            self._before = digest


@dataclass(frozen=True)
class AuditLine:
    """Line of an audit log."""

    file: Path
    number: int  # its number in the file, from 1
    record: Mapping[str, Any]  # its content
    problem: str = ""  # how the chain is broken here; empty for a sound line


def read_audit(folder: str | Path) -> Iterator[AuditLine]:
    """Yield the lines of all files of a folder, file by file, and check their chains.

    Raises HoneError: the folder has no audit log.
    """
    files = sorted(Path(folder).expanduser().glob("*.jsonl"))
    if not files:
        raise HoneError(
            "there is no audit log",
            where=str(folder),
            fix="actor_rollout_ref.rollout.multi_turn.audit_dir=DIR, or hone serve --audit DIR",
        )
    listed = files[0].parent / _FILES
    for name in listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else [_FILES]:
        if not (listed.parent / name).is_file():
            yield AuditLine(listed.parent / name, 0, {}, "the file was removed")
    for file in files:
        line, digests = AuditLine(file, 0, {}), [FIRST]
        head, digest = _head_of(file)  # before the lines: more may be written meanwhile
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if number > 1:
                    yield line
                try:
                    record = json.loads(raw)
                    sound = record["before"] == digests[-1]
                    problem = "" if sound else "the line before was changed, removed or inserted"
                except (ValueError, KeyError, TypeError, RecursionError):
                    record, problem = {}, "this is not a line of the log"
                digests.append(hashlib.sha256(raw).hexdigest())
                line = AuditLine(file, number, record, problem)
        behind = len(digests) - 1 - _head_of(file)[0]
        if not line.problem and (not 0 <= head < len(digests) or digests[head] != digest or behind > 1):
            line = replace(line, problem="this is not the line that was written last")
        if line.number or line.problem:
            yield line


def _head_of(file: Path) -> tuple[int, str]:
    """Return number and hash of the last line of a log, by its head; -1 without one."""
    try:
        count, digest = (file.with_suffix(_HEAD).read_text() or f"0 {FIRST}").split()
        return int(count), digest
    except (OSError, ValueError):
        return -1, ""


def _unwritable(path: Path, error: OSError) -> HoneError:
    return HoneError(
        f"a tool call cannot be recorded: {error.strerror or error}",
        why="every call must be in the audit log, so the call does not happen",
        fix="free space or permit writing, or choose another folder",
        where=str(path),
    )

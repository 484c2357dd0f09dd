"""Publish the current work of each process of a run, what it waits for and since when.

        <run>/activity/<name>.<pid>.activity     one memory-mapped page per process, overwritten in place
        <run>/activity/<name>.<pid>.stacks       its Python stacks, written on request (see hone.insight.stacks)
        <run>/activity/timeline                  exists while processes also record what they finished (see hone.insight.timeline)

A process names itself once (:func:`begin`), and then describes its work around the work itself:

    with activity.doing("update_actor"):
        for micro_batch in micro_batches:
            ...
            activity.tick(done, len(micro_batches))
    with activity.waiting("score of 64 responses", on=["reward worker"], limit=30.0):
        ...

A tick costs a fraction of a microsecond and no system call. A process that never called :func:`begin` publishes nothing, so
callers need no check. Only the standard library is used: reward workers and the watchdog start without torch.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hone.insight import stacks, timeline

FOLDER = "activity"
_PAGE = 4096
_HEAD = struct.Struct("<QQdII")  # version, ticks, time of the last tick, and done and all items of the current loop
_TICKS = struct.Struct("<QdII")
_VERSION = struct.Struct("<Q")
_SLOT = struct.Struct("<QI")  # version and length of the text that follows
_SLOT_BYTES = (_PAGE - _HEAD.size) // 2
_TEXT_BYTES = _SLOT_BYTES - _SLOT.size - _VERSION.size
_STAGE = "_hone_stage"
_TIMELINE = "timeline"  # file of the folder; it exists while processes record their timelines


@dataclass(frozen=True)
class Span:
    """One activity of a process, possibly a wait."""

    what: str  # work that is done, or thing that is waited for
    since: float  # wall time at which it began
    # names of processes (``actor[1]``) or of a role (``actor``); empty for work in the process itself
    waits_on: tuple[str, ...] = ()
    limit: float | None = None  # seconds it may take without any progress; None: ``trainer.watchdog_seconds`` decides
    waits: bool = False  # whether it is a wait for something outside this process
    thread: int = 0  # identity of the thread that began it


@dataclass(frozen=True)
class Record:
    """Published state of one process."""

    role: str
    rank: int | None  # None if the role has one process only
    pid: int
    host: str
    born: int  # start in clock ticks since boot, unlike that of a later process with its pid
    spans: tuple[Span, ...] = ()  # current activities, the outermost first
    ticks: int = 0  # progress so far, a number that only grows
    moved: float = 0.0  # wall time of the last tick or change of activity
    done: int = 0  # items of the current loop that have ended
    total: int = 0  # all items of that loop; 0 if it does not count them
    log: str | None = None  # file that takes its output, if there is one
    path: Path = field(default=Path(), compare=False)

    @property
    def name(self) -> str:
        return self.role if self.rank is None else f"{self.role}[{self.rank}]"

    @property
    def stage(self) -> str:
        return _shown(self.spans) or "idle"

    @property
    def thread(self) -> int:
        """Return the identity of the thread of the innermost activity; 0 when idle."""
        return self.spans[-1].thread if self.spans else 0

    @property
    def stacks_file(self) -> Path:
        return self.path.with_suffix(".stacks")

    def is_here(self) -> bool:
        return is_here(self.host)

    def is_alive(self) -> bool:
        """Return whether the process exists; one on another machine is assumed to."""
        return not self.is_here() or birth(self.pid) == self.born


def is_here(host: str) -> bool:
    return host == socket.gethostname()


def _shown(spans: Sequence[Span]) -> str:
    return " > ".join(span.what for span in spans)


class _Publisher:
    """Writer of this process's record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: mmap.mmap | bytearray = bytearray(_PAGE)
        self._spans: list[Span] = []
        self._identity: dict[str, object] = {}
        self._ticks = self._version = 0
        self._files: list[Path] = []
        self._recorder: timeline.Recorder | None = None

    def begin(self, directory: Path, role: str, rank: int | None, log: str | None) -> None:
        self.end()
        directory.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", role) + ("" if rank is None else f"-{rank}")
        path = directory / f"{name}.{os.getpid()}.activity"
        with path.open("w+b") as file:
            file.truncate(_PAGE)
            page = mmap.mmap(file.fileno(), _PAGE)
        with self._lock:
            self._page = page
            self._files = [path, path.with_suffix(".stacks")]
            self._identity = {
                "role": role,
                "rank": rank,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "born": birth(os.getpid()),
                "log": log,
            }
            self._write()
        if (directory / _TIMELINE).exists():
            self.record()
        stacks.answer_requests(path.with_suffix(".stacks"))

    def record(self) -> None:
        """Append every span that ends from now on to the timeline of this process."""
        folder = self._files[0].parent.parent / timeline.FOLDER
        folder.mkdir(exist_ok=True)
        process = {key: self._identity[key] for key in ("role", "rank", "pid", "host")}
        with self._lock:
            self._recorder = timeline.Recorder(folder / f"{self._files[0].stem}.jsonl", process)

    @property
    def stage(self) -> str:
        return _shown(self._spans)

    @property
    def folder(self) -> Path | None:
        return self._files[0].parent if self._files else None

    def end(self) -> None:
        """Remove the record: the process ends in good order."""
        with self._lock:
            if isinstance(self._page, mmap.mmap):
                self._page.close()
            self._page, files, self._files = bytearray(_PAGE), self._files, []
            if self._recorder is not None:
                self._recorder.write()
                self._recorder = None
        if files:
            stacks.stop_answering()
        for file in files:
            file.unlink(missing_ok=True)

    def tick(self, done: int, total: int) -> None:
        self._ticks += 1
        _TICKS.pack_into(self._page, _VERSION.size, self._ticks, time.time(), done, total)

    def push(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)
            self._write()

    def pop(self, span: Span) -> None:
        with self._lock:
            self._spans = [other for other in self._spans if other is not span]
            self._write()
            if self._recorder is not None:
                self._recorder.add(span.what, span.since, span.thread, span.waits)

    def _write(self) -> None:
        """Write the whole record into the slot that is not in use, then name it as the current one.

        A process that is killed here leaves its previous record. The version at both ends of a slot, the last one written
        first, shows a reader that the slot was overwritten while it was read.
        """
        spans = [[s.what, s.since, s.waits_on, s.limit, s.waits, s.thread] for s in self._spans]
        text = json.dumps({**self._identity, "spans": spans}).encode()
        while len(text) > _TEXT_BYTES and spans:  # more than a slot: keep the innermost, the most useful ones
            spans.pop(0)
            text = json.dumps({**self._identity, "spans": spans}).encode()
        self._ticks += 1
        self._version += 1
        start = _slot(self._version)
        _VERSION.pack_into(self._page, start + _SLOT_BYTES - _VERSION.size, self._version)
        self._page[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._page, start, self._version, len(text))
        _HEAD.pack_into(self._page, 0, self._version, self._ticks, time.time(), 0, 0)


def _slot(version: int) -> int:
    return _HEAD.size + version % 2 * _SLOT_BYTES


_publisher = _Publisher()


def begin(directory: Path, role: str, rank: int | None = None) -> None:
    """Publish this process under ``directory`` from now on, and answer requests for its stacks. ``directory``:
    ``<run>/activity``; made if absent.
    """
    _publisher.begin(directory, role, rank, _stderr_file())


def clear(directory: Path) -> None:
    """Remove the records of an earlier run's processes; called by the first process of a run."""
    for path in directory.glob("*.activity"):
        path.with_suffix(".stacks").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    (directory / _TIMELINE).unlink(missing_ok=True)


def record_timeline() -> None:
    """Record the timeline of this process, which publishes, and of every process that begins to publish after it."""
    directory = _publisher.folder
    if directory is not None:
        (directory / _TIMELINE).touch()
        _publisher.record()


def forget(pid: int) -> None:
    """Remove the record of a process that this one ended on purpose."""
    for path in _publisher.folder.glob(f"*.{pid}.*") if _publisher.folder else ():
        path.unlink(missing_ok=True)


def folder() -> Path | None:
    """Return the directory in which this process publishes, for its child processes; None if it does not publish."""
    return _publisher.folder


def end() -> None:
    """Stop publishing and remove the record: this process ends in good order."""
    _publisher.end()


def tick(done: int = 0, total: int = 0) -> None:
    """Report progress: a decode step, a micro-batch, an answer. ``done`` of ``total`` items of the loop have ended, where it counts."""
    _publisher.tick(done, total)


@contextlib.contextmanager
def doing(what: str, *, limit: float | None = None) -> Iterator[None]:
    """Publish the work of this process while the body runs. ``limit``: seconds it may take without progress, if that is
    long (loading a model).
    """
    with _span(Span(what, time.time(), (), limit, thread=threading.get_ident())):
        yield


@contextlib.contextmanager
def waiting(what: str, *, on: Sequence[str] = (), limit: float | None = None) -> Iterator[None]:
    """Publish the wait of this process while the body runs.

    Args:
        on: names of the processes, or the roles, that can end the wait.
        limit: seconds after which the wait ends by itself; it counts as a hang only after that.
    """
    with _span(Span(what, time.time(), tuple(on), limit, waits=True, thread=threading.get_ident())):
        yield


@contextlib.contextmanager
def _span(span: Span) -> Iterator[None]:
    _publisher.push(span)
    try:
        yield
    except BaseException as error:
        vars(error).setdefault(_STAGE, _publisher.stage)  # the innermost span sets it first
        raise
    finally:
        _publisher.pop(span)


def stage_of(error: BaseException) -> str:
    """Return the activities during which an error was raised; "" outside of any span."""
    return vars(error).get(_STAGE, "")


def read_records(directory: Path) -> list[Record]:
    """Return the records of all processes that publish in ``directory``, in the order of their names."""
    records = []
    for path in sorted(directory.glob("*.activity")):
        record = _read(path)
        if record is not None:
            records.append(record)
    return records


def _read(path: Path) -> Record | None:
    """Return one record; None if its process has just ended or has not written yet."""
    for _ in range(20):
        try:
            page = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(page) < _PAGE:
            return None
        version, ticks, moved, done, total = _HEAD.unpack_from(page)
        start = _slot(version)
        written, length = _SLOT.unpack_from(page, start)
        if version and version == written == _VERSION.unpack_from(page, start + _SLOT_BYTES - _VERSION.size)[0]:
            text = page[start + _SLOT.size : start + _SLOT.size + length]
            fields = json.loads(text)
            spans = tuple(Span(what, since, tuple(on), *others) for what, since, on, *others in fields.pop("spans"))
            return Record(**fields, spans=spans, ticks=ticks, moved=moved, done=done, total=total, path=path)
        time.sleep(0.001)
    return None


def _stderr_file() -> str | None:
    """Return the file that takes this process's standard error, if it is a file."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return None
    return str(path) if path.is_file() else None


def birth(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


atexit.register(end)

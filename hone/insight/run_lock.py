"""Lock of a run directory: one process at a time trains in it.

    <run>/run.lock      process id, host and start of the process that holds it; removed when the run ends

The lock is a ``flock`` on that file, which the kernel releases when the process ends, also after ``kill -9``. A file without a
lock is a leftover of such an end: the next run takes it over. Programs that the run starts do not inherit it (close-on-exec),
and forked children close it at once, so that workers which outlive the driver do not keep it.

On file systems without ``flock`` the record decides: a process of this host that is alive, with the same start time, holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hone.errors import HoneError
from hone.insight.activity import birth, is_here
from hone.insight.run_files import disk_errors, now

LOCK = "run.lock"

log = logging.getLogger("hone")

_UNSUPPORTED = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))


@dataclass(frozen=True)
class LockOwner:
    """Process that holds a lock, as its file records it."""

    pid: int
    host: str
    started: str  # time at which it took the lock
    # start of the process in clock ticks since boot; it distinguishes it from a later process with the same id
    born: int | None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} (since {self.started})"

    @classmethod
    def this_process(cls) -> LockOwner:
        return cls(os.getpid(), socket.gethostname(), now(), birth(os.getpid()))

    def is_alive(self) -> bool:
        return is_here(self.host) and birth(self.pid) is not None and birth(self.pid) == self.born


@dataclass
class _Held:
    """Lock that this process holds, and how often it was taken."""

    descriptor: int
    count: int = 1


_held: dict[Path, _Held] = {}
_guard = threading.RLock()


class RunLock:
    """Locks of a run's directories, until :meth:`release` or the end of the process.

    A process can take the same lock several times; it is released with the last one. ``directories``: created if
    absent.

    Raises HoneError: another process holds one of them, or it cannot be written.
    """

    def __init__(self, *directories: str | Path) -> None:
        self._paths: list[Path] = []
        try:
            for directory in directories:
                path = Path(directory).expanduser().resolve()
                _acquire(path)
                self._paths.append(path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the locks; a second call does nothing."""
        while self._paths:
            _release(self._paths.pop())

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(directory: Path) -> bool:
    """Return whether a process trains in a directory; one of another machine counts until it has released its lock."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        owner = _read(descriptor)
    finally:
        os.close(descriptor)
    return owner is None or not is_here(owner.host) or owner.is_alive()


def _acquire(directory: Path) -> None:
    with _guard:
        if directory in _held:
            _held[directory].count += 1
            return
        path = directory / LOCK
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(path)
            try:
                earlier = _read(descriptor)
                if earlier is not None:
                    log.warning("%s ended without releasing %s: this process takes the run over", earlier, path)
                _write(descriptor, LockOwner.this_process())
            except BaseException:
                os.close(descriptor)
                raise
        _held[directory] = _Held(descriptor)


def _locked(path: Path) -> int:
    """Open and lock the file of a lock; return its descriptor. Raises HoneError: another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(path.parent, _owner_of(descriptor)) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                owner = _read(descriptor)
                if owner is not None and owner.is_alive():
                    raise _in_use(path.parent, owner) from None
            if _is_file(descriptor, path):  # otherwise its holder has just removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(directory: Path) -> None:
    with _guard:
        held = _held.get(directory)
        if held is None:  # in a fork of the process that took it
            return
        held.count -= 1
        if held.count:
            return
        del _held[directory]
        path = directory / LOCK
        with contextlib.suppress(OSError):  # a directory that is gone or full of errors needs no release
            if _is_file(held.descriptor, path):
                path.unlink()
        os.close(held.descriptor)


def _close_in_child() -> None:
    """Close the locks in a forked child: closing a copy of the descriptor leaves the parent's lock as it is."""
    global _guard
    _guard = threading.RLock()  # another thread of the parent may have held the old one
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _owner_of(descriptor: int) -> LockOwner | None:
    """Return the record of a held lock, which its holder writes right after taking it."""
    deadline = time.monotonic() + 1.0
    while (owner := _read(descriptor)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return owner


def _read(descriptor: int) -> LockOwner | None:
    """Return the record in a lock's file; None if it is empty or half-written."""
    try:
        return LockOwner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, owner: LockOwner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(owner)).encode() + b"\n", 0)


def _in_use(directory: Path, owner: LockOwner | None) -> HoneError:
    end = f"kill {owner.pid}" + ("" if is_here(owner.host) else f" on {owner.host}") if owner else "its process"
    return HoneError(
        f"the directory is in use by {owner or 'another process'}",
        where=str(directory),
        why="two runs or services in one directory overwrite each other's files",
        fix="choose another directory: trainer.experiment_name=<another name>, or trainer.default_local_dir=DIR (and another "
        f"trainer.checkpoint_dir if it is set), of a service --out DIR; or wait for the other, or end it: {end}",
        code="E-run-in-use",
    )

"""Engine processes that start in a moment, for tests that start dozens: forked from a process that has imported everything.

They are the real server program, with sockets, a process group and an end of their own; only the seconds of their imports are
saved. :func:`install` is called in the process of a run before it has threads (``Command(..., prepare=install)``).
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import IO, Any

import psutil

from hone.generation.remote import process
from hone.generation.server import native_backend, serve

_PID = struct.Struct("i")
_template: socket.socket
_asking = threading.Lock()


def install() -> None:
    """Have this process fork its engines from now on."""
    global _template
    assert native_backend and threading.active_count() == 1
    _template, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        _template.close()
        try:
            _fork_when_asked(theirs, parent)
        finally:
            os._exit(1)
    theirs.close()
    process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedEngine, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


def _fork_when_asked(asked: socket.socket, parent: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.setsid()
    while True:
        data, files, _, _ = socket.recv_fds(asked, 1, 3)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            asked.close()
            _become_engine(files, parent)
        for file in files:
            os.close(file)
        asked.sendall(_PID.pack(pid))


def _become_engine(files: list[int], parent: int) -> None:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stderr = os.fdopen(0, closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.getppid = lambda: parent  # the end of its standard input tells it that the run is gone
    try:
        serve.main()
    finally:
        os._exit(1)


def engines_of(pid: int) -> list[psutil.Process]:
    """Return the engines of a run: each leads a session, and is forked from a process that leads one too."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(child.pid) == child.pid and child.ppid() != pid:
                found.append(child)
    return found


class ForkedEngine:
    """What ``subprocess.Popen`` is for a process that another one forks."""

    def __init__(self, command: list[str], *, stderr: IO[bytes], **_: Any) -> None:
        stdin, write = os.pipe()
        read, stdout = os.pipe()
        with _asking:
            socket.send_fds(_template, [b"x"], [stdin, stdout, stderr.fileno()])
            (self.pid,) = _PID.unpack(_template.recv(_PID.size))
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it is gone; who did not start it learns only that it is."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, 0)
                return None
        self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("engine", timeout or 0.0)
            time.sleep(0.005)
        return code

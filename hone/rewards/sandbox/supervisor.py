"""The parent of one program in the sandbox: a small process that enforces its limits and ends everything it started.

Run as ``python -I -S supervisor.py``, with nothing but the standard library. It reads one JSON request (a line) from standard
input and writes one JSON answer to standard output. Standard input is also its lifeline: when it closes, whoever asked is
gone, and the program is ended. Orphans of the program become children of this process, so none gets away.

    request: argv, tail, env, stdin, files {path: text}, directory (make one for the files), uid, unshare, limits {...}
    answer:  ending, exit_code, stdout, stderr (base64), seconds, error
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import math
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLL = 0.02
"""Seconds between two looks at memory and processor time."""
CHUNK = 65536
OWN = 4
"""Processes that confine the program, beside its own."""
_SUBREAPER, _NO_NEW_PRIVILEGES = 36, 38  # of prctl(2)
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000  # of unshare(2)
_PAGE, _TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    if _libc.prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        answer = Supervised(request).run()
    except OSError as error:
        answer = {"ending": "broken", "error": f"{type(error).__name__}: {error}"}
    finally:
        end_all()
    sys.stdout.write(json.dumps(answer))


class Supervised:
    """One program, from start to end.

    Args:
        request: see the module.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.limits = request, request["limits"]
        self.output: dict[int, bytearray] = {}
        self.exit_code: int | None = None
        self.folder: str | None = None

    def run(self) -> dict[str, Any]:
        """Start it, watch it, end it; returns the answer."""
        begun = time.monotonic()
        try:
            child = self._start()
            ending = self._watch(child, begun + self.limits["seconds"])
            end_all()
            self._drain()
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
        stdout, stderr = (base64.b64encode(bytes(text)).decode() for text in self.output.values())
        return {
            "ending": ending,
            "exit_code": self.exit_code if ending == "finished" else None,
            "stdout": stdout,
            "stderr": stderr,
            "seconds": time.monotonic() - begun,
        }

    # start -----------------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        request = self.request
        files = self._files()
        stdin = _in_memory(request["stdin"])
        argv = [*request["argv"], *(word for _, words in files for word in words), *request["tail"]]
        child = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=request["env"],
            cwd=self.folder or "/",
            pass_fds=[number for number, _ in files],
            start_new_session=True,
            preexec_fn=self._confine,  # this process has one thread
        )
        for number in (stdin, *(number for number, _ in files)):
            os.close(number)
        assert child.stdout is not None and child.stderr is not None
        for pipe in (child.stdout, child.stderr):
            os.set_blocking(pipe.fileno(), False)
            self.output[pipe.fileno()] = bytearray()
        return child

    def _files(self) -> list[tuple[int, list[str]]]:
        """Bring the files into a folder of their own, or make them ready for bubblewrap to copy."""
        if not self.request["directory"]:
            ready = []
            for name, text in self.request["files"].items():
                number, path = _in_memory(text), Path("/tmp", name)
                folders = [str(folder) for folder in reversed(path.parents) if len(folder.parts) > 2]
                words = [word for folder in folders for word in ("--perms", "0777", "--dir", folder)]
                ready.append((number, [*words, "--perms", "0666", "--file", str(number), str(path)]))
            return ready
        self.folder = tempfile.mkdtemp(prefix="hone-sandbox-")
        for name, text in self.request["files"].items():
            path = Path(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
        if self.request["uid"] is not None:
            for path in (Path(self.folder), *Path(self.folder).rglob("*")):
                os.chown(path, self.request["uid"], self.request["uid"])
        return []

    def _confine(self) -> None:
        """In the child, before the program: limits, and for root another user."""
        limits, megabyte = self.limits, 2**20
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_seconds"]) + 1)
        _limit(resource.RLIMIT_AS, limits["memory_mb"] * megabyte)
        _limit(resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte)
        _limit(resource.RLIMIT_NOFILE, limits["open_files"])
        if self.request["unshare"]:
            _libc.unshare(_NEW_NETWORK | _NEW_IPC)  # what came of it was found out beforehand
        uid = self.request["uid"]
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if self.request["directory"]:
            _limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if uid is not None else _tasks_of_user()))
            _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)

    # watch -----------------------------------------------------------------------------------------------------------

    def _watch(self, child: subprocess.Popen[bytes], deadline: float) -> str:
        """Wait until it ends, breaks a limit, or nobody waits for it any more."""
        lifeline, life, looked = sys.stdin.fileno(), os.pidfd_open(child.pid), 0.0
        with selectors.DefaultSelector() as selector:
            for number in (*self.output, lifeline, life):
                selector.register(number, selectors.EVENT_READ)
            while not self._ended(child):
                for key, _ in selector.select(POLL):
                    if key.fd == lifeline:
                        return "broken"
                    if key.fd in self.output and not self._read(key.fd):
                        selector.unregister(key.fd)
                if sum(map(len, self.output.values())) > self.limits["output_bytes"]:
                    return "output"
                now = time.monotonic()
                if now > deadline:
                    return "timeout"
                if now - looked > POLL:
                    looked, (processes, memory, seconds) = now, usage()
                    if processes > self.limits["processes"] + OWN:
                        return "processes"
                    if memory > self.limits["memory_mb"] * 2**20:
                        return "memory"
                    if seconds > self.limits["cpu_seconds"]:
                        return "timeout"
        return "finished"

    def _ended(self, child: subprocess.Popen[bytes]) -> bool:
        """Bury what has ended; whether the program is among it."""
        while self.exit_code is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == child.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def _read(self, number: int) -> bool:
        """Take what a pipe holds; false at its end."""
        try:
            data = os.read(number, CHUNK)
        except BlockingIOError:
            return True
        self.output[number] += data
        return bool(data)

    def _drain(self) -> None:
        """What is left in the pipes of a program that has ended, up to the limit."""
        for number, text in self.output.items():
            with contextlib.suppress(BlockingIOError):
                while len(text) <= self.limits["output_bytes"] and (data := os.read(number, CHUNK)):
                    text += data
            del text[self.limits["output_bytes"] :]


def end_all() -> None:
    """Kill every descendant of this process, those that are born meanwhile too, and bury them."""
    for _ in range(10_000):
        found = descendants()
        if not found:
            return
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # what stands still cannot fork
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
        time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants() -> list[int]:
    """All processes below this one."""
    found, row = [], [os.getpid()]
    while row:
        row = [child for pid in row for child in _children(pid)]
        found += row
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children


def usage() -> tuple[int, int, float]:
    """Number and memory in bytes of all descendants, and the processor time of them and of those buried, in seconds."""
    memory, ticks, found = 0, 0, descendants()
    for pid in found:
        with contextlib.suppress(OSError, ValueError):
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children waited for
    buried = resource.getrusage(resource.RUSAGE_CHILDREN)
    return len(found), memory, ticks / _TICK + buried.ru_utime + buried.ru_stime


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _tasks_of_user() -> int:
    """Processes and threads that this user has already: the limit counts them all."""
    count = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _in_memory(text: str) -> int:
    """A file without a name that holds ``text``, open at its beginning."""
    number, data = os.memfd_create("input"), text.encode(errors="surrogatepass")
    while data:
        data = data[os.write(number, data) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number


if __name__ == "__main__":
    main()

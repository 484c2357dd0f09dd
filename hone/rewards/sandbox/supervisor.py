"""Parent process of one sandboxed program: enforces its limits and ends all processes that it started.

Run as ``python -I -S supervisor.py`` with only the standard library and ``processes.py``. It reads one JSON request (a line) from standard input and
writes one JSON answer to standard output. When standard input closes, the requesting process is gone, and the program is ended.
Orphans of the program become children of this process, so none escapes.

    request: argv, tail, env, stdin, files {path: text}, directory (make one for the files), workspace (folder whose
             files count as the program's, or empty), uid, filter (base64, or null),
             landlock (see system_calls.rules, or null), cgroup (folder, or empty), limits {...}
    answer:  ending, exit_code, stdout, stderr (base64), seconds, error, left (folder that could not be removed)
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
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # python -I leaves it out
from processes import (
    LOCK,
    PIPE,
    descendants,
    end_all,
    exceeds,
    files_of_mount,
    locks,
    opened,
    remove,
    socket_bytes,
    unix_sockets,
    usage,
)  # noqa: E402

POLL = 0.02  # seconds between two checks of memory and processor time, and at least between two of the program's files
CHUNK = 65536
CONFINING_PROCESSES = 4  # maximum number of processes that only confine the program
_DROP_BOUND, _CAPABILITIES = 24, 0x20080522  # of prctl(2), and the version of capset(2)
_SET_DUMPABLE, _SUBREAPER, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 4, 36, 38, 22, 2  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT, _BELOW_PATH = 444, 445, 446, 1  # system calls of Landlock
_SOCKET = socket_bytes()
_UNSEEN = 25  # looks in a row at processes that hide what they have open, after which they are ended
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    if _libc.prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        answer = Supervised(request).run()
    except (OSError, subprocess.SubprocessError) as error:
        answer = {"ending": "broken", "error": f"{type(error).__name__}: {error}"}
    finally:
        end_all()
    sys.stdout.write(json.dumps(answer))


class Supervised:
    """Supervised program, from start to end."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.limits = request, request["limits"]
        self.output: dict[int, bytearray] = {}
        self.exit_code: int | None = None
        self.folder: str | None = None
        self.unseen, self.sockets = 0, unix_sockets("self")
        self.group = Path(request["cgroup"], f"hone-sandbox-{os.getpid()}") if request["cgroup"] else None
        self.filter = base64.b64decode(request["filter"]) if request["filter"] else None

    def run(self) -> dict[str, Any]:
        """Start, watch and end the program; return the answer."""
        begun = time.monotonic()
        try:
            child = self._start()
            ending = self._watch(child, begun + self.limits["seconds"])
            end_all()
            self._drain()
            if ending == "finished" and self.group and "oom_kill 0" not in (self.group / "memory.events").read_text():
                ending = "memory"
        finally:
            if self.group and self.group.exists():
                end_all()
                self.group.rmdir()
            left = self.folder is not None and not remove(self.folder)
        stdout, stderr = (base64.b64encode(bytes(text)).decode() for text in self.output.values())
        return {
            "ending": ending,
            "exit_code": self.exit_code if ending == "finished" else None,
            "stdout": stdout,
            "stderr": stderr,
            "seconds": time.monotonic() - begun,
            "left": self.folder if left else "",
        }

    # start -----------------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        request = self.request
        files = self._files()
        self._make_group()
        stdin = _in_memory(_encoded(request["stdin"]))
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
            preexec_fn=self._confine,  # safe: this process has one thread
        )
        for number in (stdin, *(number for number, _ in files)):
            os.close(number)
        assert child.stdout is not None and child.stderr is not None
        for pipe in (child.stdout, child.stderr):
            os.set_blocking(pipe.fileno(), False)
            self.output[pipe.fileno()] = bytearray()
        return child

    def _files(self) -> list[tuple[int, list[str]]]:
        """Write the files into a new folder, or prepare them and the filter for bubblewrap to read."""
        if not self.request["directory"]:
            ready = []
            if self.filter is not None:
                number = _in_memory(self.filter)
                ready.append((number, ["--seccomp", str(number)]))
            for name, text in self.request["files"].items():
                number, path = _in_memory(_encoded(text)), Path("/tmp", name)
                folders = [str(folder) for folder in reversed(path.parents) if len(folder.parts) > 2]
                words = [word for folder in folders for word in ("--perms", "0777", "--dir", folder)]
                ready.append((number, [*words, "--perms", "0666", "--file", str(number), str(path)]))
            return ready
        self.folder = tempfile.mkdtemp(prefix="hone-sandbox-")
        self.request["env"] |= {"HOME": self.folder, "TMPDIR": self.folder}
        for name, text in self.request["files"].items():
            path = Path(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
        if self.request["uid"] is not None:
            for path in (Path(self.folder), *Path(self.folder).rglob("*")):
                os.chown(path, self.request["uid"], self.request["uid"])
        return []

    def _make_group(self) -> None:
        """Make a control group for the program, with its files in memory."""
        if self.group:
            self.group.mkdir()
            size = (self.limits["memory_mb"] + 2 * self.limits["disk_mb"]) * 2**20
            bounds = {
                "memory.max": size,
                "memory.swap.max": 0,
                "pids.max": self.limits["processes"] + CONFINING_PROCESSES * (self.folder is None),
            }
            for name, value in bounds.items():
                if name != "memory.swap.max" or (self.group / name).exists():  # else the kernel does not count it
                    (self.group / name).write_text(str(value))

    def _confine(self) -> None:
        """Set limits, and another user for root, in the child process before the program."""
        limits, megabyte = self.limits, 2**20
        if self.group:
            (self.group / "cgroup.procs").write_text("0")
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_seconds"]) + 1)
        _limit(resource.RLIMIT_AS, limits["memory_mb"] * megabyte)
        _limit(resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte)
        _limit(resource.RLIMIT_NOFILE, limits["open_files"])
        _limit(resource.RLIMIT_SIGPENDING, 1024)
        if not self.request["directory"]:
            return  # bubblewrap does the rest
        uid = self.request["uid"]
        _limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if uid is not None else _tasks_of_user()))
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if self.request["landlock"]:
            _restrict_files(self.request["landlock"], str(self.folder))
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        elif os.geteuid() == 0:
            _drop_capabilities()
        if self.filter is not None:
            _filter_system_calls(self.filter)

    # watch -----------------------------------------------------------------------------------------------------------

    def _watch(self, child: subprocess.Popen[bytes], deadline: float) -> str:
        """Wait until the program ends, exceeds a limit, or the requesting process is gone."""
        lifeline, life, looked, disk = sys.stdin.fileno(), os.pidfd_open(child.pid), 0.0, 0.0
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
                if now > looked:
                    processes, memory, seconds = self._usage()
                    looked = time.monotonic() + POLL
                    if processes > self.limits["processes"] + CONFINING_PROCESSES:
                        return "processes"
                    if memory > self.limits["memory_mb"] * 2**20 or self.unseen > _UNSEEN:
                        return "memory"
                    if seconds > self.limits["cpu_seconds"]:
                        return "timeout"
                if now > disk:
                    if self._exceeds_disk():
                        return "disk"
                    disk = now + max(POLL, 4 * (time.monotonic() - now))
        return "finished"

    def _exceeds_disk(self) -> bool:
        files, size = self.limits["files"], self.limits["disk_mb"] * 2**20
        if self.request["workspace"]:
            return exceeds(self.request["workspace"], files, size)
        if self.folder is None:  # bubblewrap's file systems have a size, and their number of files is known
            return any(files_of_mount(pid) > files for pid in descendants()[-1:])
        return exceeds(self.folder, files, size)

    def _usage(self) -> tuple[int, int, float]:
        """Return processes and threads, memory (bytes) with that of the kernel for them, and processor time (s)."""
        pids, threads, memory, seconds = usage()
        memory += LOCK * locks(set(pids))
        if self.folder is None:  # all sockets are those of the network namespace; pipes are bounded by the kernel
            return threads, memory + _SOCKET * (unix_sockets(pids[-1]) if pids else 0), seconds
        files, hidden = opened(pids)
        self.unseen = self.unseen + 1 if hidden else 0
        kinds = [stat.S_IFMT(status.st_mode) for status in files.values()]
        sockets = kinds.count(stat.S_IFSOCK)
        if threads > len(pids):  # a thread that waits for a file keeps it when another one closes it
            most = sockets + (threads - len(pids)) * self.limits["open_files"]
            sockets = max(sockets, min(most, unix_sockets("self") - self.sockets))
        return threads, memory + _SOCKET * sockets + PIPE * kinds.count(stat.S_IFIFO), seconds

    def _ended(self, child: subprocess.Popen[bytes]) -> bool:
        """Reap ended processes; return whether the program is among them."""
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
        """Read a pipe's data; return False at its end."""
        try:
            data = os.read(number, CHUNK)
        except BlockingIOError:
            return True
        self.output[number] += data
        return bool(data)

    def _drain(self) -> None:
        """Read the rest of an ended program's pipes, up to the limit."""
        for number, text in self.output.items():
            with contextlib.suppress(BlockingIOError):
                while len(text) <= self.limits["output_bytes"] and (data := os.read(number, CHUNK)):
                    text += data
            del text[self.limits["output_bytes"] :]


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _tasks_of_user() -> int:
    """Count this user's processes and threads, which the limit includes."""
    count = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _restrict_files(rules: dict[str, Any], folder: str) -> None:
    """Leave this process and its children only the files that the rules name, and a folder."""
    handled = (ctypes.c_uint64 * 3)(*rules["handled"])
    size = 8 if not any(rules["handled"][1:]) else 16 if not rules["handled"][2] else 24
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    for path, rights in {**rules["paths"], folder: rules["folder"]}.items():
        with contextlib.suppress(FileNotFoundError):
            number = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if stat.S_ISDIR(os.fstat(number).st_mode) else rights & rules["file"]
            rule = struct.pack("=Qi", allowed, number)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _BELOW_PATH, rule, 0), "landlock_add_rule")
            os.close(number)
    _checked(_libc.syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _drop_capabilities() -> None:
    """Leave root its files alone: no capability now, and none after another program begins."""
    for number in range(64):
        if _libc.prctl(_DROP_BOUND, number, 0, 0, 0) < 0:
            break  # after the last one
    _checked(_libc.capset(struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)), "capset")


def _filter_system_calls(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_SECCOMP, _FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


def _checked(answer: int, call: str) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), call)
    return answer


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _in_memory(data: bytes) -> int:
    """Create an unnamed file with ``data``, open at its beginning."""
    number = os.memfd_create("input")
    while data:
        data = data[os.write(number, data) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number


if __name__ == "__main__":
    main()

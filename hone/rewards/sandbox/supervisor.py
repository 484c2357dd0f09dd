"""Parent process of one sandboxed program: enforces its limits and ends all processes that it started.

Run as ``python -I -S supervisor.py`` with only the standard library. It reads one JSON request (a line) from standard input and
writes one JSON answer to standard output. When standard input closes, the requesting process is gone, and the program is ended.
Orphans of the program become children of this process, so none escapes.

    request: argv, tail, env, stdin, files {path: text}, directory (make one for the files), uid, filter (base64, or null),
             landlock (see landlock.rules, or null), limits {...}
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
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLL = 0.02
"""Seconds between two checks of memory and processor time, and at least between two of the program's files."""
CHUNK = 65536
CONFINING_PROCESSES = 4
"""Maximum number of processes that only confine the program."""
_DROP_BOUND, _CAPABILITIES = 24, 0x20080522  # of prctl(2), and the version of capset(2)
_SUBREAPER, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 36, 38, 22, 2  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT, _BELOW_PATH = 444, 445, 446, 1  # system calls of Landlock
_PAGE, _TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
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
    """Supervised program, from start to end.

    Args:
        request: see the module docstring.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.limits = request, request["limits"]
        self.output: dict[int, bytearray] = {}
        self.exit_code: int | None = None
        self.folder: str | None = None
        self.filter = base64.b64decode(request["filter"]) if request["filter"] else None

    def run(self) -> dict[str, Any]:
        """Start, watch and end the program; return the answer."""
        begun = time.monotonic()
        try:
            child = self._start()
            ending = self._watch(child, begun + self.limits["seconds"])
            end_all()
            self._drain()
        finally:
            left = self.folder is not None and not _remove(self.folder)
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

    def _confine(self) -> None:
        """Set limits, and another user for root, in the child process before the program."""
        limits, megabyte = self.limits, 2**20
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_seconds"]) + 1)
        _limit(resource.RLIMIT_AS, limits["memory_mb"] * megabyte)
        _limit(resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte)
        _limit(resource.RLIMIT_NOFILE, limits["open_files"])
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
                if now - looked > POLL:
                    looked, (processes, memory, seconds) = now, usage()
                    if processes > self.limits["processes"] + CONFINING_PROCESSES:
                        return "processes"
                    if memory > self.limits["memory_mb"] * 2**20:
                        return "memory"
                    if seconds > self.limits["cpu_seconds"]:
                        return "timeout"
                if now > disk:
                    if self._exceeds_disk():
                        return "disk"
                    disk = now + max(POLL, 4 * (time.monotonic() - now))
        return "finished"

    def _exceeds_disk(self) -> bool:
        """Return whether the program's files are too many or too large."""
        files, size = self.limits["files"], self.limits["disk_mb"] * 2**20
        if self.folder is None:  # bubblewrap's file systems have a size, and their number of files is known
            return any(_files_of_mount(pid) > files for pid in descendants()[-1:])
        return exceeds(self.folder, files, size)

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


def exceeds(folder: str, files: int, size: int) -> bool:
    """Return whether a folder, with open files that have no name, has more files or bytes, or cannot be looked into."""
    count, used, folders = 0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    status = entry.stat(follow_symlinks=False)
                    used += status.st_blocks * 512
                    if count > files or used > size:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            return True  # too deep, or closed to its owner
    return used + _unnamed_bytes() > size


def _unnamed_bytes() -> int:
    """Return the bytes of files that descendants have open and that have no name any more."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in descendants():
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _files_of_mount(pid: int) -> int:
    """Return the number of files in the folder for temporary files that a process sees."""
    used = 0
    with contextlib.suppress(OSError):
        for folder in ("tmp", "dev/shm"):
            path = Path(f"/proc/{pid}/root/{folder}")
            if path.stat().st_dev != Path("/", folder).stat().st_dev:  # else bubblewrap has not yet changed the root
                status = os.statvfs(path)
                used += status.f_files - status.f_ffree
    return used


def _remove(folder: str) -> bool:
    """Remove a folder of any depth, whatever its files allow their owner; return whether it is gone."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if not os.path.lexists(folder):
            break
        subprocess.run([*command, "--", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return not os.path.lexists(folder)


def end_all() -> None:
    """Kill and reap every descendant of this process, including those forked meanwhile."""
    for _ in range(10_000):
        pids = descendants()
        if not pids:
            return
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
        time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants() -> list[int]:
    """Return the ids of all descendants of this process."""
    pids, generation = [], [os.getpid()]
    while generation:
        generation = [child for pid in generation for child in _children(pid)]
        pids += generation
    return pids


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children


def usage() -> tuple[int, int, float]:
    """Return number and memory (bytes) of all descendants, and processor time (s) including reaped ones."""
    memory, ticks, pids = 0, 0, descendants()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of reaped children
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return len(pids), memory, ticks / _TICK + reaped.ru_utime + reaped.ru_stime


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
    """Filter the system calls of this process and its children."""
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

"""The descendants of this process: which they are, what they hold, and their end.

Part of the supervisor, with only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_PAGE, _TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
PIPE, MAPPING, LOCK = 16 * _PAGE, 1024, 256
"""Most memory (bytes) of the kernel for a pipe, for a mapping of a process, and for a lock on a part of a file."""
_libc = ctypes.CDLL(None, use_errno=True)


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


def usage() -> tuple[list[int], int, int, float]:
    """Return ids of all descendants, their threads, memory (bytes), and processor time (s) including reaped ones."""
    memory, ticks, threads, pids = 0, 0, 0, descendants()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            tasks = _tasks(pid)
            threads += len(tasks)
            memory += next(filter(None, map(_memory, tasks)), 0) + MAPPING * len(_maps(pid))
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of reaped children
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return pids, threads, memory, ticks / _TICK + reaped.ru_utime + reaped.ru_stime


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def _as_user_of(pid: int) -> Iterator[None]:
    """Look at a process as its user, which root may otherwise not be allowed to."""
    user = 0
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            user = Path(f"/proc/{pid}").stat().st_uid
    if user:
        _libc.setfsgid(user)
        _libc.setfsuid(user)
    try:
        yield
    finally:
        if user:
            _libc.setfsuid(0)
            _libc.setfsgid(0)


def _memory(task: Path) -> int:
    """Return the memory of a thread's process (bytes), with its page tables and what is swapped out; 0 if it has ended."""
    lines = (task / "status").read_text(errors="replace").splitlines()
    fields = [line.split() for line in lines if line.startswith(("VmRSS:", "VmSwap:", "VmPTE:"))]
    return sum(int(field[1]) * 1024 for field in fields)


def _maps(pid: int) -> list[bytes]:
    with _as_user_of(pid):
        for task in _tasks(pid):
            with contextlib.suppress(OSError):
                if lines := (task / "maps").read_bytes().splitlines():
                    return lines
    return []


def unix_sockets(process: int | str) -> int:
    """Return the number of sockets in the network namespace of a process; 0 if it has this process's."""
    with contextlib.suppress(OSError):
        ours, theirs = (Path(f"/proc/{name}/ns/net").stat().st_ino for name in ("self", process))
        if process == "self" or ours != theirs:
            return Path(f"/proc/{process}/net/unix").read_bytes().count(b"\n") - 1
    return 0


def locks(pids: set[int]) -> int:
    with contextlib.suppress(OSError):
        return sum(int(line.split()[-4]) in pids for line in Path("/proc/locks").read_bytes().splitlines())
    return 0


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
    return used + _unnamed_bytes(size // 16) > size


def opened(pids: list[int]) -> tuple[dict[tuple[int, int], os.stat_result], bool]:
    """Return the files that processes have open, by device and number, and whether some process hides its own.

    Threads may have files of their own, and those of a process whose first thread has ended are those of the others.
    """
    files, hidden = {}, False
    for pid in pids:
        with _as_user_of(pid):
            for task in _tasks(pid):
                try:
                    for entry in os.scandir(task / "fd"):
                        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                            status = entry.stat()
                            files[status.st_dev, status.st_ino] = status
                except OSError as error:
                    hidden |= isinstance(error, PermissionError) and not _ended(task)
    return files, hidden


def _ended(task: Path) -> bool:
    """Return whether a thread has ended, and has nothing open."""
    with contextlib.suppress(OSError):
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("Z", "X")
    return True


def _unnamed_bytes(size: int) -> int:
    """Return the bytes of files that descendants have open or mapped and that have no name any more. ``size``: what is
    assumed of a mapped file whose size this user may not see.
    """
    pids = descendants()
    unnamed = {file: status for file, status in opened(pids)[0].items() if stat.S_ISREG(status.st_mode)}
    sizes = {file: status.st_blocks * 512 for file, status in unnamed.items() if status.st_nlink == 0}
    for pid in pids:
        for line in _maps(pid):
            if line.endswith(b" (deleted)") and b" /dev/zero " not in line:  # those are shared mappings without a file
                area, _, _, device, number = line.split()[:5]
                major, minor = (int(part, 16) for part in device.split(b":"))
                place = "-".join(f"{int(end, 16):x}" for end in area.split(b"-"))
                mapped = size
                with contextlib.suppress(OSError):
                    mapped = Path(f"/proc/{pid}/map_files/{place}").stat().st_blocks * 512
                sizes.setdefault((os.makedev(major, minor), int(number)), mapped)
    return sum(sizes.values())


def files_of_mount(pid: int) -> int:
    """Return the number of files in the folder for temporary files that a process sees."""
    used = 0
    with contextlib.suppress(OSError):
        for folder in ("tmp", "dev/shm"):
            path = Path(f"/proc/{pid}/root/{folder}")
            if path.stat().st_dev != Path("/", folder).stat().st_dev:  # else bubblewrap has not yet changed the root
                status = os.statvfs(path)
                used += status.f_files - status.f_ffree
    return used


def remove(folder: str) -> bool:
    """Remove a folder of any depth, whatever its files allow their owner; return whether it is gone."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if not os.path.lexists(folder):
            break
        subprocess.run([*command, "--", folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return not os.path.lexists(folder)


def socket_bytes() -> int:
    """Return the most memory that one socket's data takes: full buffers, and a message that just began."""
    with contextlib.suppress(OSError):
        return 2 * int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 2 * 212992

"""Collect the Python stacks of other processes, even of one that holds or awaits the interpreter lock forever.

A process that publishes its activity (:mod:`hone.insight.activity`) answers one real-time signal by writing the stacks of all
its threads to a file. The answer comes from a C signal handler, which needs neither the interpreter lock nor a running main
thread. Without an answer (the process is stopped), py-spy is used, if it is installed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REQUEST = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (7 if hasattr(signal, "SIGRTMIN") else 0)
"""Signal that the interpreter, Ray and batch systems do not use."""
PATIENCE = 2.0  # seconds that processes have to answer

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_SPIED_THREAD = re.compile(r"Thread (?:0x)?([0-9A-Fa-f]+) \(.+\)")
_SPIED_FRAME = re.compile(r"    (.+) \((.+):(\d+)\)$")
_MACHINERY = ("torch/_ops.py", "torch/distributed/c10d_logger.py", "/contextlib.py", "torch/utils/_contextlib.py")
"""Frames between a caller and the collective that it waits in."""

_file: IO[str] | None = None


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class ThreadStacks:
    """Stacks of the threads of one process."""

    text: str  # stacks of all threads, as written
    frames: tuple[Frame, ...] = ()  # frames of the working thread, the innermost first; empty if unknown
    problem: str = ""  # reason for a missing text; empty otherwise

    @property
    def collective(self) -> str | None:
        """Return the function of torch.distributed that the process waits in, or None."""
        for frame in self.frames:
            if not frame.file.endswith(_MACHINERY):
                return frame.function if "/torch/distributed/" in frame.file else None
        return None


def answer_requests(file: Path) -> None:
    """Write the stacks of this process to ``file`` whenever :data:`REQUEST` arrives."""
    global _file
    stop_answering()
    _file = file.open("w", encoding="utf-8")
    faulthandler.register(REQUEST, file=_file, all_threads=True, chain=False)


def stop_answering() -> None:
    global _file
    if _file is not None:
        faulthandler.unregister(REQUEST)
        _file.close()
        _file = None


def collect(processes: Mapping[int, Path], threads: Mapping[int, int]) -> dict[int, ThreadStacks]:
    """Request the stacks of processes of this machine.

    Args:
        processes: pid to the file that receives its answer.
        threads: pid to the identity of its working thread; 0 is the main thread.

    Returns:
        The stacks of every pid, or why there are none.
    """
    before = {pid: _size(file) for pid, file in processes.items()}
    problems: dict[int, str] = {}
    for pid, file in processes.items():
        if not file.exists():
            problems[pid] = "it publishes no stacks"
            continue
        try:
            os.kill(pid, REQUEST)
        except ProcessLookupError:
            problems[pid] = "it is dead"
        except PermissionError:
            problems[pid] = "it belongs to another user"
    signalled = [pid for pid in processes if pid not in problems]
    _wait_for_answers({pid: processes[pid] for pid in signalled}, before)
    stacks: dict[int, ThreadStacks] = {}
    for pid, file in processes.items():
        text = file.read_text(errors="replace")[before[pid] :] if pid in signalled else ""
        if not text and problems.get(pid) != "it is dead":
            text = _by_py_spy(pid)
            problems.setdefault(pid, f"it does not answer ({_state(pid)})")
        if text:
            problems.pop(pid, None)
        stacks[pid] = ThreadStacks(text, parse(text, threads.get(pid, 0)), problems.get(pid, ""))
    return stacks


def parse(text: str, thread: int) -> tuple[Frame, ...]:
    """Return the frames of one thread in the output of faulthandler or py-spy, the innermost first. ``thread``:
    identity of the thread; 0 or unknown: the main thread, which faulthandler writes last.
    """
    threads: dict[int, list[Frame]] = {}
    last = 0
    for line in text.splitlines():
        if head := _THREAD.match(line) or _SPIED_THREAD.match(line):
            last = int(head[1], 16)
            threads[last] = []
        elif frame := _FRAME.match(line):
            threads.setdefault(last, []).append(Frame(frame[1], int(frame[2]), frame[3]))
        elif spied := _SPIED_FRAME.match(line):
            threads.setdefault(last, []).append(Frame(spied[2], int(spied[3]), spied[1]))
    return tuple(threads.get(thread) or threads.get(last, ()))


def _wait_for_answers(files: Mapping[int, Path], before: Mapping[int, int]) -> None:
    """Wait until every file has grown and stopped growing, or the time limit ends."""
    deadline, sizes = time.monotonic() + PATIENCE, dict(before)
    while files and time.monotonic() < deadline:
        time.sleep(0.1)
        now = {pid: _size(file) for pid, file in files.items()}
        if all(now[pid] == sizes[pid] > before[pid] for pid in files):
            return
        sizes.update(now)


def _by_py_spy(pid: int) -> str:
    """Return the output of py-spy for a process that does not answer; empty if it is not installed or not permitted."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process = subprocess.run(
            [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return process.stdout if process.returncode == 0 else ""
    return ""


def _state(pid: int) -> str:
    """Return the kernel's state of a process in words."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    names = {"T": "stopped", "t": "traced", "D": "in an uninterruptible system call", "Z": "dead, not yet reaped"}
    return names.get(letter, f"state {letter}")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0

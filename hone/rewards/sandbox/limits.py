"""What a program in the sandbox may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Limits:
    """What a program, with all the processes it starts, may use.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time of all its processes; None means ``seconds``.
        memory_mb: memory of all its processes together; also the address space of each.
        processes: processes and threads at one time.
        output_bytes: bytes of standard output and standard error together.
        disk_mb: files it writes (of each file where there is no bubblewrap).
        open_files: open files of each process.
    """

    seconds: float = 10.0
    cpu_seconds: float | None = None
    memory_mb: int = 1024
    processes: int = 32
    output_bytes: int = 1_000_000
    disk_mb: int = 64
    open_files: int = 256


class Ending(StrEnum):
    """How a program ended."""

    FINISHED = "finished"
    """By itself, whatever its exit code."""
    TIMEOUT = "timeout"
    """It used up its wall time or its processor time."""
    MEMORY = "memory"
    """It used up its memory."""
    OUTPUT = "output"
    """It wrote more than it may."""
    PROCESSES = "processes"
    """It had more processes than it may, where the system itself does not refuse them."""
    BROKEN = "broken"
    """The sandbox itself failed: nothing is known of the program."""


@dataclass(frozen=True)
class Result:
    """What became of a program.

    Attributes:
        ending: how it ended.
        exit_code: its exit code, negative for a signal; None when it was stopped.
        stdout, stderr: what it wrote, up to the limit; bytes that are no UTF-8 are replaced.
        seconds: wall time.
        error: why the sandbox failed, empty unless ``ending`` is broken.
    """

    ending: Ending
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ending is Ending.FINISHED and self.exit_code == 0

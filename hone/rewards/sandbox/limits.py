"""Limits and results of programs in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hone.errors import NoVerdict


@dataclass(frozen=True)
class Limits:
    """Limits of a program together with all processes that it starts.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time of all processes; None means ``seconds``.
        memory_mb: memory of all processes together; also the address space of each.
        processes: processes and threads at the same time.
        output_bytes: bytes of standard output and standard error together.
        disk_mb: size of written files together, and of each; with bubblewrap in each of ``/tmp`` and ``/dev/shm``.
        files: files and folders at the same time.
        open_files: open files of each process.
    """

    seconds: float = 10.0
    cpu_seconds: float | None = None
    memory_mb: int = 1024
    processes: int = 32
    output_bytes: int = 1_000_000
    disk_mb: int = 64
    files: int = 10_000
    open_files: int = 256


class Ending(StrEnum):
    """Reason for the end of a program."""

    FINISHED = "finished"
    """The program ended by itself, with any exit code."""
    TIMEOUT = "timeout"
    """The program reached its limit of wall time or processor time."""
    MEMORY = "memory"
    """The program reached its memory limit."""
    OUTPUT = "output"
    """The program wrote more than allowed."""
    PROCESSES = "processes"
    """The program had too many processes, and the system did not refuse them."""
    DISK = "disk"
    """The program wrote too many files, or too large ones."""
    BROKEN = "broken"
    """The sandbox itself failed, so the program's result is unknown."""


class SandboxFailed(NoVerdict):
    """Error of a sandbox that failed itself, so that the program's result is unknown."""

    cause = "sandbox"


@dataclass(frozen=True)
class Result:
    """Result of a program.

    Attributes:
        ending: reason for its end.
        exit_code: exit code, negative for a signal; None if it was stopped.
        stdout, stderr: its output up to the limit; invalid UTF-8 is replaced.
        seconds: wall time.
        error: reason for a sandbox failure; empty unless ``ending`` is broken.
    """

    ending: Ending
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.ending is Ending.FINISHED and self.exit_code == 0

    def checked(self) -> Result:
        """Return the result.

        Raises:
            SandboxFailed: the sandbox failed, not the program.
        """
        if self.ending is Ending.BROKEN:
            raise SandboxFailed(f"the sandbox failed: {self.error}")
        return self

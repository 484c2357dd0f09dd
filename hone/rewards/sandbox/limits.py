"""Limits and results of programs in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hone.errors import NoVerdict


@dataclass(frozen=True)
class Limits:
    """Limits of a program together with all processes that it starts."""

    seconds: float = 10.0  # wall time
    cpu_seconds: float | None = None  # processor time of all processes; None means ``seconds``
    memory_mb: int = 1024  # memory of all processes together; also the address space of each
    processes: int = 32  # processes and threads at the same time
    output_bytes: int = 1_000_000  # bytes of standard output and standard error together
    # size of written files together, and of each; with bubblewrap in each of ``/tmp`` and ``/dev/shm``
    disk_mb: int = 64
    files: int = 10_000  # files and folders at the same time
    open_files: int = 256  # open files of each process


class Ending(StrEnum):
    """Reason for the end of a program."""

    FINISHED = "finished"  # the program ended by itself, with any exit code
    TIMEOUT = "timeout"  # the program reached its limit of wall time or processor time
    MEMORY = "memory"  # the program reached its memory limit
    OUTPUT = "output"  # the program wrote more than allowed
    PROCESSES = "processes"  # the program had too many processes, and the system did not refuse them
    DISK = "disk"  # the program wrote too many files, or too large ones
    BROKEN = "broken"  # the sandbox itself failed, so the program's result is unknown


class SandboxFailed(NoVerdict):
    """Error of a sandbox that failed itself, so that the program's result is unknown."""

    cause = "sandbox"


@dataclass(frozen=True)
class Result:
    """Result of a program."""

    ending: Ending
    exit_code: int | None = None  # exit code, negative for a signal; None if it was stopped
    stdout: str = ""  # up to the limit, as the errors; invalid UTF-8 is replaced
    stderr: str = ""
    seconds: float = 0.0  # wall time
    error: str = ""  # reason for a sandbox failure; empty unless ``ending`` is broken

    @property
    def succeeded(self) -> bool:
        return self.ending is Ending.FINISHED and self.exit_code == 0

    def checked(self) -> Result:
        """Return the result; raise SandboxFailed if the sandbox failed, not the program."""
        if self.ending is Ending.BROKEN:
            raise SandboxFailed(f"the sandbox failed: {self.error}")
        return self

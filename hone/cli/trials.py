"""Training runs that `hone twins` and `hone sweep` start, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = "output.log"
_ALL = 1_000_000
_SHOWN = 12  # last lines of a failed run's output in the error


@dataclass(frozen=True)
class Trial:
    words: tuple[str, ...]  # arguments of the `hone` command
    directory: Path
    cwd: Path | None = None  # directory in which the command runs; None means the current one

    @property
    def finished(self) -> bool:
        """True if the run has ended with all its steps."""
        from hone.insight.run_directory import RunStatus, read_run
        from hone.insight.run_files import RUN

        return (self.directory / RUN).exists() and read_run(self.directory).get("status") == RunStatus.FINISHED.value


def settings_of(program: str, directory: Path, overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides of a trial: its directory, resuming, all validation answers, and the given keys."""
    from hone.config.overrides import hydra_value

    keys: dict[str, Any] = {"trainer.default_local_dir": str(directory), "trainer.resume_mode": "auto"}
    if program == "train":
        keys["trainer.log_val_generations"] = _ALL
    return [f"{key}={hydra_value(value)}" for key, value in (keys | dict(overrides)).items()]


def run_trial(trial: Trial) -> None:
    """Train a run to its end, its output in ``output.log`` of the run directory; a run that was cut off is resumed."""
    from hone.errors import HoneError

    trial.directory.mkdir(parents=True, exist_ok=True)
    log = trial.directory / LOG
    with log.open("ab") as output:
        command = [sys.executable, "-m", "hone.cli.main", *trial.words]
        with _Forwarding() as forwarding:
            process = subprocess.Popen(
                command,
                cwd=trial.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = forwarding.wait(process)
    if forwarding.interrupted or code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:]
        raise HoneError(
            f"the run ended with exit code {code}:\n    " + "\n    ".join(lines),
            where=str(trial.directory),
            why="a comparison needs all its runs",
            fix="correct what the message above names and run the same command: finished runs are not repeated",
            code="E-runs",
        )


class _Forwarding:
    """Pass SIGINT and SIGTERM on to a run, which saves and ends; a second one ends it at once."""

    def __init__(self) -> None:
        self.interrupted = False  # True after the first signal
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Forwarding:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: object) -> None:
        self.interrupted = True
        if self._process is None:
            self._waiting.append(number)
        else:
            self._process.send_signal(number)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of the run when it has ended."""
        self._process = process
        for number in self._waiting:
            process.send_signal(number)
        return process.wait()


def file_words(file: Path, preset: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the arguments by which a training command reads a configuration file."""
    chosen = ["--preset", preset] if preset else []
    return ["--config-path", str(file.parent), "--config-name", file.name, *chosen, *overrides]

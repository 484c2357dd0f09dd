"""Read the files of a run directory, encode numbers that JSON lacks, and report disk errors."""

from __future__ import annotations

import contextlib
import datetime
import errno
import getpass
import json
import math
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, BinaryIO

from hone.errors import HoneError
from hone.text import valid_text


class StepLines:
    """Append-only file of JSON lines by step, such as ``metrics.jsonl`` and ``coverage.jsonl``; created by the first step.

    All lines of a step are written and flushed together. A half line that a kill left is dropped when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._last_step: int | None = None
        self._last_names: set[str] = set()  # keys of all lines of the last step

    @property
    def last_step(self) -> int | None:
        self._open()
        return self._last_step

    def append(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records of a step, one flushed line each, with ``step`` as their first entry.

        The last step may get more lines with other keys, such as the metrics of a validation that ended after its step.

        Raises:
            ValueError: a later step has lines already, or this step has one of these keys; call :meth:`rewind` first on resume.
            HoneError: the disk is full.
        """
        last, records = self.last_step, list(records)
        names = {name for record in records for name in record}
        repeats = step == last and (not names or names & self._last_names)
        if last is not None and (step < last or repeats):
            raise ValueError(f"{self.path.name}: lines of step {step} cannot follow those of step {last}")
        lines = [json.dumps({"step": step, **record}, allow_nan=False) + "\n" for record in records]
        file = self._open()
        with disk_errors(self.path):
            try:
                file.write("".join(lines))
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):  # its buffer holds them: no later call may write them, or fail again
                    self.close()
                raise
        self._last_names = names | self._last_names if step == last else names
        self._last_step = step

    def rewind(self, step: int) -> int:
        """Remove the lines after ``step`` and return their number.

        Raises HoneError: a line other than the last is not JSON.
        """
        self.close()
        if not self.path.exists():
            return 0
        rows = list(read_rows(self.path))
        kept = [line for number, line in rows if number <= step]
        write_atomically(self.path, "".join(line + "\n" for line in kept))
        return len(rows) - len(kept)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> IO[str]:
        """Return the file, open at its end; a half last line is removed when it is opened."""
        if self._file is None:
            with disk_errors(self.path):
                self._last_step, self._last_names = None, set()
                if self.path.exists():
                    rows = list(read_rows(self.path))
                    os.truncate(self.path, sum(len(line.encode()) + 1 for _, line in rows))
                    self._last_step = rows[-1][0] if rows else None
                    last_lines = [json.loads(line) for step, line in rows if step == self._last_step]
                    self._last_names = {name for record in last_lines for name in record if name != "step"}
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
        return self._file


CONFIG, RUN, METRICS_FILE, COVERAGE_FILE = "config.yaml", "run.json", "metrics.jsonl", "coverage.jsonl"
ALERTS_FILE = "alerts.jsonl"


def read_run(path: str | Path) -> dict[str, Any]:
    """Return ``run.json`` of a run directory. Raises HoneError: the file is missing or not JSON."""
    file = Path(path) / RUN
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HoneError("the file does not exist", where=str(file), fix="name the directory of a run") from None
    except json.JSONDecodeError as error:
        raise HoneError(
            f"the file is not JSON: {error}", where=str(file), fix="restore the file or remove the directory"
        ) from None


def containing_run(path: Path) -> Path | None:
    return next((folder for folder in path.absolute().parents if (folder / RUN).is_file()), None)


def author() -> str:
    """Return user and machine of this process, for records of what people did."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        name = str(os.getuid())
    return f"{name}@{platform.node()}"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the steps of a ``metrics.jsonl`` (or of its run directory), each with its ``step``.

    The lines of a step are merged: the second one has the metrics of a validation that ended after its step. A half-written last line is left out. ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` become floats again.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        return []
    rows: dict[int, dict[str, float]] = {}
    for step, line in read_rows(file):
        values = {
            name: float(value) if isinstance(value, str) else value and +value  # a TypeError for what is not a number
            for name, value in json.loads(line).items()
        }
        rows[step] = rows.get(step, {}) | values
    return list(rows.values())


def read_alerts(run: str | Path) -> list[dict[str, Any]]:
    """Return the alerts of a run directory by step, each with its ``step``; see :mod:`hone.insight.detectors`."""
    file = Path(run) / ALERTS_FILE
    return [json.loads(line) for _, line in read_rows(file)] if file.is_file() else []


def read_rows(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (step, line) of every whole line; text after the last line break is half a line."""
    lines = file.read_bytes().split(b"\n")[:-1]
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode()
            yield int(json.loads(line)["step"]), line
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
            if number == len(lines):  # a crash of the machine can leave garbage in the last line
                return
            raise HoneError(
                f"line {number} of {len(lines)} is not a JSON object with a step",
                where=str(file),
                why="the history of the run cannot be continued",
                fix="remove the line, or start a new run directory with trainer.experiment_name=...",
            ) from None


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under another name and rename it into place.

    Raises HoneError: the disk is full or not writable.
    """
    with atomic_file(path) as file:
        file.write(valid_text(text).encode())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file under another name for writing, and rename it into place at the end of the block without an error.

    Raises HoneError: the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert disk errors (full, read-only, forbidden) to a :class:`HoneError` with the numbers and the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HoneError(
                f"the disk is full{_free_space(path)}",
                where=str(path),
                why="metrics, samples and checkpoints cannot be saved; everything saved before is intact",
                fix="free space and run the same command again (trainer.resume_mode=auto), "
                "or choose another disk with trainer.default_local_dir=...",
                code="E-disk-full",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise unwritable(path, error.strerror or str(error)) from error
        raise


def unwritable(path: Path, reason: str) -> HoneError:
    return HoneError(
        f"'{path}' cannot be written: {reason}",
        where=str(path),
        why="what is computed would have no place",
        fix="choose a writable place (of a run: trainer.default_local_dir=DIR)",
        code="E-run-directory",
    )


def _free_space(path: Path) -> str:
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    if existing is None:
        return ""
    usage = shutil.disk_usage(existing)
    return f" ({usage.free / 2**20:.0f} MB of {usage.total / 2**30:.1f} GB free)"


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def encode_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def jsonable(value: Any) -> Any:
    """Convert to plain JSON values: arrays to lists, enums to their value, other types to text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, float):
        return encode_number(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)

"""Append-only file of JSON lines by step, such as ``metrics.jsonl`` and ``coverage.jsonl``.

All lines of a step are written and flushed together. A half line that a kill left is dropped when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from hone.insight.run_files import disk_errors, read_rows, write_atomically


class StepLines:
    """Writer of one such file. The file is created by the first step."""

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

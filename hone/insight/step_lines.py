"""Append-only file of JSON lines by step, such as ``metrics.jsonl`` and ``coverage.jsonl``.

All lines of a step are written and flushed together. A half line that a kill left is dropped when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from hone.insight.run_files import disk_errors, read_rows, write_atomically


class StepLines:
    """Writer of one such file. The file is created by the first step.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._last_step: int | None = None

    @property
    def last_step(self) -> int | None:
        """Return the step of the last line, None if there is none."""
        self._open()
        return self._last_step

    def append(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records of a step, one flushed line each, with ``step`` as their first entry.

        Raises:
            ValueError: this step, or a later one, has lines already; call :meth:`rewind` first on resume.
            HoneError: the disk is full.
        """
        last = self.last_step
        if last is not None and step <= last:
            raise ValueError(f"{self.path.name}: lines of step {step} cannot follow those of step {last}")
        lines = [json.dumps({"step": step, **record}, allow_nan=False) + "\n" for record in records]
        file = self._open()
        with disk_errors(self.path):
            file.write("".join(lines))
            file.flush()
        self._last_step = step

    def rewind(self, step: int) -> int:
        """Remove the lines after ``step`` and return their number.

        Raises:
            HoneError: a line other than the last is not JSON.
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
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[str]:
        """Return the file, open at its end; a half last line is removed when it is opened."""
        if self._file is None:
            with disk_errors(self.path):
                self._last_step = None
                if self.path.exists():
                    rows = list(read_rows(self.path))
                    os.truncate(self.path, sum(len(line.encode()) + 1 for _, line in rows))
                    self._last_step = rows[-1][0] if rows else None
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
        return self._file

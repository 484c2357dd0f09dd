"""Passed boxes of a learner: ``learn/progress.json`` in the working folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.apps.learn.entries import Entry, find_entry
from hone.errors import HoneError
from hone.insight.run_files import now, write_atomically

FOLDER = Path("learn")
"""Folder of the course, in the learner's working folder."""
FILE = "progress.json"
_VERSION = 1


@dataclass
class Progress:
    """Entry of a learner, and the boxes passed."""

    entry: str  # name of the entry
    # name of each passed box to ``at`` (ISO 8601, UTC) and ``measured``, what its check saw
    passed: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def way(self) -> Entry:
        return find_entry(self.entry)

    @property
    def current(self) -> str | None:
        """The first box of the entry that is not passed; None after the last one."""
        return next((name for name in self.way.boxes if name not in self.passed), None)

    def add(self, box: str, measured: str) -> None:
        self.passed[box] = {"at": now(), "measured": measured}


def read_progress(folder: Path = FOLDER) -> Progress:
    file = folder / FILE
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        progress = Progress(record["entry"], {name: dict(entry) for name, entry in record["passed"].items()})
    except FileNotFoundError:
        raise HoneError(
            "no course is started in this folder",
            where=str(file),
            fix="hone learn start new, or change to the folder in which it was started",
            code="E-learn",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HoneError(
            f"the file is damaged: {error!r}",
            where=str(file),
            fix="remove it, `hone learn start`, and check the boxes again: what they look at is still there",
            code="E-learn",
        ) from None
    find_entry(progress.entry)
    return progress


def write_progress(progress: Progress, folder: Path = FOLDER) -> None:
    """Write the progress under another name and rename it into place; make the folder."""
    record = {"version": _VERSION, "entry": progress.entry, "passed": progress.passed}
    write_atomically(folder / FILE, json.dumps(record, indent=1) + "\n")

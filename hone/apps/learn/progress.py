"""Entries of the course (which boxes in which order, on which of 30 days), and the boxes that a learner has passed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.apps.learn.texts import COURSE
from hone.errors import HoneError, did_you_mean
from hone.insight.run_files import now, write_atomically


@dataclass(frozen=True)
class Stop:
    """A box on the way of an entry, with its day from 1 to 30."""

    day: int
    box: str

    @property
    def week(self) -> int:
        """Week from 1 to 4; the last two days belong to the fourth."""
        return min(4, (self.day + 6) // 7)


@dataclass(frozen=True)
class Entry:
    """A way through the course."""

    name: str  # name on the command line
    title: str  # readers whom it is for
    stops: tuple[Stop, ...]  # its boxes in order, with their days

    @property
    def boxes(self) -> list[str]:
        return [stop.box for stop in self.stops]


def find_entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise HoneError(f"no entry '{name}'", fix=did_you_mean(name, ENTRIES), code="E-learn", where="hone learn start")
    return ENTRIES[name]


ENTRIES = {
    name: Entry(
        name, entry["title"], tuple(Stop(day, box) for day, names in entry["days"].items() for box in names.split())
    )
    for name, entry in COURSE["entries"].items()
}
"""The three entries."""
NEEDS: dict[str, str] = COURSE["needs"]
"""Boxes that use the results of another one."""
FOLDER = Path("learn")
"""Folder of the course, in the learner's working folder."""
FILE = "progress.json"
_VERSION = 1


@dataclass
class Progress:
    """Entry of a learner, and the boxes passed."""

    entry: str
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

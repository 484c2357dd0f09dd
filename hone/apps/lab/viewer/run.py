"""One run as the viewer holds it: its directory, its indexes, and what was read last."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from hone.apps.lab.compare import Run, whole_runs
from hone.apps.lab.viewer.index import CODES, Rows, RunIndex
from hone.apps.lab.viewer.queries import MASKS, Groups, Search, group_rows, matching
from hone.errors import HoneError
from hone.insight.archive.read import table_records

T = TypeVar("T")

KINDS = ("rollouts", "validation")
_PAUSE = 0.5
"""Seconds between two looks at the directory."""
_HELD, _HELD_GROUPS = 128, 8
"""Answers to earlier questions that are kept."""
_END = 220
"""Last characters of an answer, which a list shows."""


class Archived:
    """Rollouts or validation samples (``kind``) of a run, with their index."""

    def __init__(self, folder: Path, run_path: Path, kind: str) -> None:
        self.run_path, self.kind = run_path, kind
        self.index = RunIndex(folder)
        self.search = Search(self.index)
        self._looked = 0.0
        self._lock = threading.Lock()
        self._groups: tuple[int, Groups] | None = None
        self._masks: OrderedDict[tuple[int, str], np.ndarray] = OrderedDict()
        self._texts: OrderedDict[tuple[Any, ...], list[str]] = OrderedDict()
        self._records: OrderedDict[tuple[Any, ...], list[dict[str, Any]]] = OrderedDict()
        self._tables: OrderedDict[tuple[Any, ...], pa.Table] = OrderedDict()
        self._derived: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._vocabulary: list[str] | None = None
        self._vocabulary_stamp = 0

    def rows(self) -> Rows:
        """Return all rows; new files are noticed."""
        with self._lock:
            if time.monotonic() - self._looked > _PAUSE:
                self.index.refresh()
                self._looked = time.monotonic()
        return self.index.rows()

    def groups(self, rows: Rows) -> Groups:
        held = self._groups  # another thread may replace it
        if held is None or held[0] != rows.version:
            self._groups = held = rows.version, group_rows(rows)
        return held[1]

    def matching(self, rows: Rows, query: str) -> np.ndarray:
        """Return which rows a query leaves."""
        if "label:" in query:  # a label can be added at any time
            return self._matching(rows, query)
        return _kept(self._masks, (rows.version, query), lambda: self._matching(rows, query))

    def _matching(self, rows: Rows, query: str) -> np.ndarray:
        return matching(self.index, self.search, rows, query, lambda name, value: MASKS[name](self, rows, value))

    def derived(self, name: str, rows: Rows, make: Callable[[], T]) -> T:
        """Return something computed from all rows; it is computed again when they change."""
        return _kept(self._derived, (name, rows.version), make)

    def derived_of_step(self, name: str, step: int, make: Callable[[], T]) -> T:
        """Return something computed from the file of a step; it is computed again when the file changes."""
        return _kept(self._derived, (name, step, self.index.stamp(step)), make, held=4096)

    def vocabulary(self) -> list[str] | None:
        """Return the text of every token id; None if the run has none. It is read again when the file changed."""
        file = self.index.archive.folder / "vocabulary.parquet"
        stamp = file.stat().st_mtime_ns if file.is_file() else 1
        if stamp != self._vocabulary_stamp:
            self._vocabulary, self._vocabulary_stamp = self.index.archive.vocabulary(), stamp
        return self._vocabulary

    def texts(self, step: int, column: str) -> list[str]:
        """Return a column of texts of a step by row; of answers, which may be long, the ends."""

        def read() -> list[str]:
            first = None if column == "prompt" else -_END
            return [(text or "")[first:] for text in self.index.archive.table(step, [column])[column].to_pylist()]

        return _kept(self._texts, (step, column, self.index.stamp(step)), read, held=2048)

    def records(self, step: int, uid: str, columns: Sequence[str]) -> list[dict[str, Any]]:
        key = (step, uid, tuple(columns), self.index.stamp(step))
        records = _kept(
            self._records, key, lambda: list(self.index.archive.records(step, columns, uid)), held=_HELD_GROUPS
        )
        if not records:
            raise HoneError(
                f"step {step} has no group '{uid}'", fix="choose a group of the list", code="E-view-address"
            )
        return records

    def record(self, step: int, uid: str, index: int, part: int) -> dict[str, Any]:
        """Return one sequence with all its columns."""
        key = (step, uid, self.index.stamp(step))
        table = _kept(self._tables, key, lambda: self.index.archive.table(step, None, uid), held=_HELD_GROUPS)
        chosen = (table["index"].to_numpy() == index) & (table["part"].to_numpy() == part)
        for record in table_records(table.filter(pa.array(chosen))):
            return record
        raise HoneError(
            f"group '{uid}' of step {step} has no answer {index}, part {part}",
            fix="choose an answer of the group",
            code="E-view-address",
        )

    def row_json(self, rows: Rows, row: int) -> dict[str, Any]:
        """Return the numbers and texts of one row as JSON values."""
        values = {name: column[row] for name, column in rows.columns.items() if name != "same"}
        texts = self.index.texts
        return {name: texts[name][int(value)] if name in CODES else number(value) for name, value in values.items()}


class ViewedRun:
    """One run of the viewer: a run directory, or a folder with an archive alone; ``name`` is that in addresses."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._archives = {
            "rollouts": Archived(path / "rollouts" if (path / "rollouts").is_dir() else path, path, "rollouts"),
            "validation": Archived(path / "validation", path, "validation"),
        }
        self._run: tuple[tuple[int, ...], Run] | None = None

    def archived(self, kind: str) -> Archived:
        """Return the rollouts or the validation samples."""
        if kind not in self._archives:
            raise HoneError(f"no kind '{kind}'", fix=f"one of {', '.join(KINDS)}", code="E-view-address")
        return self._archives[kind]

    def read(self) -> Run:
        """Return ``run.json``, metrics and config; they are read again when a file changed."""
        stamp = tuple(
            file.stat().st_mtime_ns if (file := self.path / name).is_file() else 0
            for name in ("run.json", "metrics.jsonl", "config.yaml")
        )
        if self._run is None or self._run[0] != stamp:
            if (self.path / "run.json").is_file():
                self._run = stamp, next(whole_runs({self.name: self.path}))
            else:
                self._run = stamp, Run(self.name, self.path, {"status": "archive"}, [], {})
        return self._run[1]

    def state(self) -> dict[str, Any]:
        """Return what changes while a run is live: status, steps, and how far the indexes are."""
        run = self.read()
        self.archived("rollouts").rows()
        progress = self.archived("rollouts").index.progress()
        return {
            "name": self.name,
            "status": run.status,
            "step": run.steps,
            "rows": progress["rows"],
            "steps": progress["steps"],
            "deep": progress["deep"],
            "reading": progress["reading"],
            "broken": progress["broken"],
            "version": progress["version"],
            "range": self._range(),
            "labels": labels.stat().st_mtime_ns if (labels := self.path / "labels.jsonl").is_file() else 0,
            "validation": self.archived("validation").index.archive.steps(),
        }

    def _range(self) -> list[Any]:
        scores = self.archived("rollouts").index.rows()["score"]
        known = scores[np.isfinite(scores)]
        return [number(known.min()), number(known.max())] if len(known) else [0, 1]


def _kept(cache: OrderedDict[Any, T], key: Any, make: Callable[[], T], *, held: int = _HELD) -> T:
    """Return the value of a key; the least recently used ones are forgotten."""
    try:
        cache.move_to_end(key)
        return cache[key]
    except KeyError:
        value = make()
    cache[key] = value
    while len(cache) > held:
        try:
            cache.popitem(last=False)
        except KeyError:  # another thread emptied it
            break
    return value


def number(value: Any) -> Any:
    """Return a number for JSON, with 7 digits; None for NaN and infinities."""
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")


def numbers(values: Iterable[Any]) -> list[Any]:
    """Return :func:`number` of each."""
    return [None if value is None else number(value) for value in values]


def plain(value: Any) -> Any:
    """Return a value of a record as JSON: numbers that JSON lacks become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return number(value)
    return value

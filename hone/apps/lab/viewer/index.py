"""Index of all sequences of a run, in memory: numbers and codes by row, read from the archive file by file.

The light columns of a step (identity, score, fate, stop reason) are read first. Those that need every token or the text (lengths,
advantages, log-ratios, tool errors) follow in a background thread, the newest step first.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from hone.errors import HoneError
from hone.insight.archive.read import Archive, open_archive

pc: Any = pyarrow.compute  # its functions are made at run time, which type checkers do not see
CODES = ("uid", "fate", "source", "stop", "end")
"""Columns of texts; the index holds a code for each, and :attr:`RunIndex.texts` the texts. Code 0 is the empty text."""
LIGHT = {
    "uid": "uid",
    "index": "index",
    "part": "part",
    "fate": "fate",
    "source": "data_source",
    "row": "row",
    "stop": "stop_reason",
    "seconds": "seconds",
    "score": "score",
    "error": "error",
}
"""Light column to column of the archive."""
HEAVY = (
    "tokens", "sampled", "advantage", "ratio", "gap", "entropy", "influence", "correction", "lag",
    "turns", "calls", "toolerrors", "end", "same",
)  # fmt: skip
"""Columns computed in the background; NaN, or code 0, until then."""
AT_ONCE = 0.25
"""Seconds of reading before the first answer."""
_TOKEN_COLUMNS = (
    "response_ids", "response_mask", "loss_mask", "token_versions", "rollout_log_probs", "old_log_probs",
    "new_log_probs", "entropy", "advantages", "correction",
)  # fmt: skip


@dataclass
class StepRows:
    """Rows of one step: an array by column, all of the same length."""

    stamp: tuple[int, int]  # modification time and size of the file, by which a rewritten step is noticed
    columns: dict[str, np.ndarray]  # values by row, in the order of the file
    deep: bool = False  # True once the heavy columns are there
    broken: str | None = None  # why the file cannot be read; None if it can


@dataclass(frozen=True)
class Rows:
    """Snapshot of all rows: an array by column. Rows are ordered by step, then as in the file."""

    columns: dict[str, np.ndarray]  # values by row; codes for :data:`CODES`
    position: np.ndarray  # row number within the step's file
    version: int  # number that changes with the contents

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


class RunIndex:
    """Index of one archive; a live run's grows with :meth:`refresh`."""

    def __init__(self, folder: Path) -> None:
        self.archive: Archive = open_archive(folder)
        self.texts: dict[str, list[str]] = {name: [""] for name in CODES}  # texts of the codes, by column
        self._codes: dict[str, dict[str, int]] = {name: {"": 0} for name in CODES}
        self._steps: dict[int, StepRows] = {}
        self._lock = threading.RLock()
        self._unread: dict[int, tuple[int, int]] = {}
        self._version = 0
        self._snapshot: Rows | None = None
        self._reader: threading.Thread | None = None

    # contents --------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Notice new, rewritten and removed files.

        The light columns of the newest are read for :data:`AT_ONCE` seconds; a background thread reads the rest.
        """
        deadline = time.monotonic() + AT_ONCE
        with self._lock:
            present = {}
            for step in self.archive.steps():
                try:
                    stat = (self.archive.folder / f"step_{step}.parquet").stat()
                except FileNotFoundError:
                    continue
                present[step] = (stat.st_mtime_ns, stat.st_size)
            self._unread = {step: stamp for step, stamp in present.items() if self.stamp(step) != stamp}
            removed = set(self._steps) - set(present)
            for step in removed:
                del self._steps[step]
            read = 0
            while self._unread and (time.monotonic() < deadline or not read):
                self._read_light()
                read += 1
            if read or removed:
                self._changed()
            if self._unread or any(not rows.deep for rows in self._steps.values()):
                self._start_reader()

    def rows(self) -> Rows:
        with self._lock:
            if self._snapshot is None:
                steps = [self._steps[step] for step in sorted(self._steps)]
                names = ["step", *LIGHT, *(name for name in HEAVY if name not in LIGHT)]
                empty = np.zeros(0)
                columns = {
                    name: np.concatenate([rows.columns[name] for rows in steps]) if steps else empty for name in names
                }
                lengths = [len(rows.columns["step"]) for rows in steps]
                position = np.concatenate([np.arange(length) for length in lengths]) if steps else empty.astype(int)
                self._snapshot = Rows(columns, position, self._version)
            return self._snapshot

    def progress(self) -> dict[str, Any]:
        """Return what the index holds: ``steps``, ``rows``, ``deep`` (number of complete steps),
        ``reading`` (whether more is to come), ``broken`` and ``version``."""
        with self._lock:
            return {
                "steps": sorted({*self._steps, *self._unread}),
                "rows": sum(len(rows.columns["step"]) for rows in self._steps.values()),
                "deep": sum(rows.deep for rows in self._steps.values()),
                "reading": bool(self._unread) or any(not rows.deep for rows in self._steps.values()),
                "broken": {step: rows.broken for step, rows in self._steps.items() if rows.broken},
                "version": self._version,
            }

    def wait(self) -> None:
        """Wait until all heavy columns are read."""
        while self._reading():
            assert self._reader is not None
            self._reader.join()

    def code(self, column: str, text: str) -> int | None:
        """Return the code of a text; None if no row has it."""
        return self._codes[column].get(text)

    # reading ---------------------------------------------------------------------------------------------------------

    def stamp(self, step: int) -> tuple[int, int] | None:
        """Return modification time and size of the file of a step, as it was read; None for an unknown step."""
        return self._steps[step].stamp if step in self._steps else None

    def _reading(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None

    def _start_reader(self) -> None:
        if not self._reading():
            self._reader = threading.Thread(target=self._read_rest, name="hone-view-index", daemon=True)
            self._reader.start()

    def _read_light(self) -> None:
        step = max(self._unread)
        self._steps[step] = self._light(step, self._unread.pop(step))

    def _light(self, step: int, stamp: tuple[int, int]) -> StepRows:
        try:
            table = self.archive.table(step, list(dict.fromkeys(LIGHT.values())))
            broken = None
        except HoneError as error:
            table, broken = None, error.what
        length = 0 if table is None else len(table)
        columns: dict[str, np.ndarray] = {"step": np.full(length, step, np.int32)}
        for name, source in LIGHT.items():
            values = pa.nulls(0) if table is None else table[source].combine_chunks()
            if name == "error":
                columns[name] = np.asarray(pc.is_valid(values)).astype(np.float32) if length else np.zeros(0)
            else:
                columns[name] = self._encoded(name, values) if name in CODES else _numbers(values)
        for name in HEAVY:
            if name not in columns:
                columns[name] = np.zeros(length, np.int32) if name in CODES else np.full(length, np.nan, np.float32)
        return StepRows(stamp, columns, deep=broken is not None, broken=broken)

    def _encoded(self, name: str, values: Any) -> np.ndarray:
        if not len(values):
            return np.zeros(0, np.int32)
        encoded = pc.dictionary_encode(pc.fill_null(values, ""))
        table, texts = self._codes[name], self.texts[name]
        codes = []
        for text in encoded.dictionary.to_pylist():
            if text not in table:
                table[text] = len(texts)
                texts.append(text)
            codes.append(table[text])
        return np.array(codes, np.int32)[np.asarray(encoded.indices)]

    def _read_rest(self) -> None:
        """Read the light, then the heavy columns of all steps, the newest first."""
        done = 0
        while True:
            with self._lock:
                if self._unread:
                    self._read_light()
                    if not self._unread:
                        self._changed()
                    continue
                missing = [step for step, rows in self._steps.items() if not rows.deep]
                if not missing:
                    self._changed()
                    return
                step = max(missing)
                rows = self._steps[step]
            try:
                columns, ends = heavy_columns(self.archive, step)
            except Exception as error:  # noqa: BLE001 - an import may hold anything; the thread reads the other steps
                columns, ends, rows.broken = {}, None, str(error) or type(error).__name__
            with self._lock:
                if ends is not None:
                    columns["end"] = self._encoded("end", ends)
                if all(len(values) == len(rows.columns["step"]) for values in columns.values()):
                    rows.columns.update(columns)
                rows.deep = True
                done += 1
                if done % 20 == 1:  # a snapshot is expensive, and readers see some progress
                    self._changed()


def _numbers(values: Any) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.cast(values, pa.float64()), np.nan)) if len(values) else np.zeros(0)


@dataclass
class Ragged:
    """Values of a list column end to end, with the offsets of the rows; rows that are null are empty."""

    values: np.ndarray
    offsets: np.ndarray
    valid: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    @staticmethod
    def from_column(column: pa.ChunkedArray) -> Ragged:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return Ragged(np.asarray(array.flatten()), offsets, np.asarray(pc.is_valid(array)))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def _by_row(operation: np.ufunc, values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Reduce the values of each row; NaN for rows without any."""
    result = np.full(len(offsets) - 1, np.nan, np.float32)
    filled = np.diff(offsets) > 0
    if filled.any():
        result[filled] = operation.reduceat(values, offsets[:-1][filled])
    return result


def heavy_columns(archive: Archive, step: int) -> tuple[dict[str, np.ndarray], pa.Array]:
    """Return the heavy columns of a step, except ``end``, whose texts are the second value.

    ``influence`` is the sum over the loss tokens of |advantage x correction|; ``same`` is a hash of the text; ``lag`` is how many
    updates separate the oldest token from the newest of the step.
    """
    table = archive.table(step, [*_TOKEN_COLUMNS, "text", "episode"])
    ragged = {name: Ragged.from_column(table[name]) for name in _TOKEN_COLUMNS}
    mask, length = ragged["response_mask"], len(table)
    columns: dict[str, np.ndarray] = {"tokens": ragged["response_ids"].lengths.astype(np.float32)}
    offsets, chosen = mask.offsets, mask.values.astype(np.float32)
    columns["sampled"] = sampled = np.nan_to_num(_by_row(np.add, chosen, offsets))
    safe = np.maximum(sampled, 1)

    def full(name: str) -> np.ndarray | None:
        """Values of a column that has as many tokens as the mask has in every row."""
        column = ragged[name]
        return column.values if np.array_equal(column.offsets, offsets) and len(column.values) else None

    def largest(first: str, second: str) -> np.ndarray:
        left, right = full(first), full(second)
        if left is None or right is None:
            return np.full(length, np.nan, np.float32)
        return _by_row(np.maximum, np.nan_to_num(np.abs(left - right) * chosen), offsets)

    def mean(values: np.ndarray | None) -> np.ndarray:
        if values is None:
            return np.full(length, np.nan, np.float32)
        return np.where(sampled > 0, _by_row(np.add, np.nan_to_num(values) * chosen, offsets) / safe, np.nan)

    advantages, correction, loss = full("advantages"), full("correction"), full("loss_mask")
    columns |= {"advantage": mean(advantages), "entropy": mean(full("entropy")), "correction": mean(correction)}
    columns |= {
        "ratio": largest("new_log_probs", "old_log_probs"),
        "gap": largest("old_log_probs", "rollout_log_probs"),
    }
    if advantages is not None:
        weight = np.abs(np.nan_to_num(advantages)) * (1 if correction is None else np.nan_to_num(correction))
        columns["influence"] = _by_row(np.add, weight * (chosen if loss is None else loss), offsets)
    versions = full("token_versions")
    if versions is not None and (versions >= 0).any():
        oldest = _by_row(np.minimum, np.where(versions >= 0, versions, np.iinfo(np.int32).max), offsets)
        columns["lag"] = np.where(_by_row(np.maximum, versions, offsets) >= 0, versions.max() - oldest, np.nan)
    same = pc.dictionary_encode(table["text"].combine_chunks())
    hashes = np.array([hash(text) & 0xFFFFFFFF for text in _texts(same)], np.float64)
    columns["same"] = hashes[_indices(same)]
    turns, calls, errors, ends = np.ones(length, np.float32), np.zeros(length), np.zeros(length), [""] * length
    for number, episode in _episodes(table["episode"]):
        turns[number] = episode.get("assistant_turns") or 1
        tool_calls = episode.get("tool_calls") or []
        calls[number] = len(tool_calls)
        errors[number] = sum(call.get("status", "ok") != "ok" for call in tool_calls)
        ends[number] = str(episode.get("end") or "")
    columns |= {"turns": turns, "calls": calls, "toolerrors": errors}
    return columns, pa.array(ends, pa.string())


def _texts(encoded: Any) -> list[str]:
    chunks = encoded.chunks if isinstance(encoded, pa.ChunkedArray) else [encoded]
    return [text for chunk in chunks for text in chunk.dictionary.to_pylist()]


def _indices(encoded: Any) -> np.ndarray:
    return np.asarray(encoded.indices)


def _episodes(column: pa.ChunkedArray) -> Iterable[tuple[int, dict[str, Any]]]:
    valid = np.flatnonzero(np.asarray(pc.is_valid(column)))
    for row, text in zip(valid.tolist(), column.take(valid).to_pylist(), strict=True):
        episode = json.loads(text)
        if isinstance(episode, dict):
            yield row, episode

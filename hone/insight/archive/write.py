"""Writer of the rollout archive: one file per step, complete or absent."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.insight.archive.schema import COLUMNS, JSON, ROWS_KEY, TEXT, VERSION, VERSION_KEY, Column, arrow_schema
from hone.insight.redaction import redact_credentials
from hone.insight.run_files import atomic_file, jsonable
from hone.text import valid_text

log = logging.getLogger("hone.insight")

VOCABULARY = "vocabulary.parquet"
STEP_FILE = re.compile(r"step_(\d+)\.parquet")
_ROW_GROUP = 1000
_SPELLED = ("prompt", "messages", "text", "episode")  # columns whose text the token ids of the row spell


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.parquet"


def to_table(records: Iterable[Mapping[str, Any]], columns: Mapping[str, pa.Array] | None = None) -> pa.Table:
    """Convert records to a table with all columns of the archive; missing values are null.

    Credentials are hidden in texts. A row in whose conversation one was hidden has no token ids, because they spell it.

    Args:
        records: one mapping per sequence. Keys that the archive does not have are an error.
        columns: finished columns, in the order of the records, instead of values in them.

    Raises:
        ValueError: a record has an unknown key, or lacks a required value.
    """
    records, columns = list(records), columns or {}
    schema = arrow_schema()
    unknown = {name for record in records for name in record} | set(columns) - set(schema.names)
    if unknown := sorted(unknown - set(schema.names)):
        raise ValueError(f"the archive has no column {', '.join(unknown)}")
    arrays, secret_rows = [], set[int]()
    for column in COLUMNS:
        if column.name in columns:
            arrays.append(columns[column.name])
            continue
        values = [record.get(column.name) for record in records]
        if column.kind in (TEXT, JSON):
            encoded = [None if value is None else _encoded(value, column) for value in values]
            values = [None if text is None else _redacted(text, column) for text in encoded]
            if column.name in _SPELLED:
                secret_rows |= {row for row, text in enumerate(encoded) if text != values[row]}
        arrays.append(pa.array(values, schema.field(column.name).type))
    empty = [column.name for column, array in zip(COLUMNS, arrays, strict=True) if column.required and array.null_count]
    if empty:
        raise ValueError(f"rows of the archive lack {', '.join(empty)}")
    table = pa.table(arrays, schema=schema)
    return _without_ids(table, secret_rows) if secret_rows else table


def write_step(folder: Path, step: int, table: pa.Table, *, rows: int | None = None) -> Path:
    """Write the file of a step under another name and rename it into place; return its path.

    ``rows``: number of sequences of the step; None if all are in the table.

    Raises HoneError: the disk is full or not writable.
    """
    path = step_file(folder, step)
    metadata = {VERSION_KEY: str(VERSION), ROWS_KEY: str(len(table) if rows is None else rows)}
    with atomic_file(path) as file:
        pq.write_table(table.replace_schema_metadata(metadata), file, compression="zstd", row_group_size=_ROW_GROUP)
    return path


def write_vocabulary(folder: Path, texts: Sequence[str]) -> Path:
    """Write the text of every token id, from 0. Raises HoneError: the disk is full or not writable."""
    ids = pa.array(range(len(texts)), pa.int32())
    table = pa.table({"id": ids, "text": pa.array([valid_text(text) for text in texts], pa.string())})
    with atomic_file(folder / VOCABULARY) as file:
        pq.write_table(table, file, compression="zstd")
    return folder / VOCABULARY


def _encoded(value: Any, column: Column) -> str:
    text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False) if column.kind == JSON else str(value)
    return valid_text(text)


def _redacted(text: str, column: Column) -> str:
    redacted = redact_credentials(text)
    if redacted == text or column.kind == TEXT:
        return redacted
    return json.dumps(_redacted_tree(json.loads(text)), ensure_ascii=False)


def _redacted_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {redact_credentials(name): _redacted_tree(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_redacted_tree(entry) for entry in value]
    return redact_credentials(value) if isinstance(value, str) else value


def _without_ids(table: pa.Table, rows: set[int]) -> pa.Table:
    """Return the table with null token ids in these rows: the ids spell what was hidden."""
    for name in ("prompt_ids", "response_ids"):
        values = [None if row in rows else ids for row, ids in enumerate(table[name].to_pylist())]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return table


class BackgroundWriter:
    """Writer of one file after the other in a thread. An error is raised by the next call.

    >>> writer, written = BackgroundWriter(), []
    >>> writer.submit(lambda: written.append(1))
    >>> writer.wait()
    >>> written
    [1]
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rollout archive")
        self._pending: Future[object] | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Begin to write once the previous file is written.

        Raises HoneError: the previous file could not be written.
        """
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last file is written. Raises HoneError: it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the last file and end the thread; an error that no call has raised is logged."""
        pending, self._pending = self._pending, None
        self._thread.shutdown()
        if pending is not None and (error := pending.exception()) is not None:
            log.error("the rollout archive lacks its last file: %s", error)

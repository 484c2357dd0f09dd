"""Reading rows from parquet, JSON and JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.errors import DataError, did_you_mean

Row = dict[str, Any]


def read_rows(files: Sequence[str], *, needs: Sequence[str], max_samples: int = -1) -> list[tuple[str, Row]]:
    """Read the rows of several files, in order.

    Args:
        files: paths ending in .parquet, .json (a list of objects) or .jsonl (one object a line).
        needs: columns that every file must have.
        max_samples: read at most this many rows, -1 means all.

    Returns:
        ``(uid, row)`` pairs; the uid is ``<file name>:<row number>``, made unique when two files share a name.

    Raises:
        DataError: a file is missing, cannot be read, is empty, or lacks a column.
    """
    rows: list[tuple[str, Row]] = []
    for number, name in enumerate(files):
        path = Path(name).expanduser()
        stem = path.stem if [Path(f).stem for f in files].count(path.stem) == 1 else f"{path.stem}[{number}]"
        found = _read(path)
        if not found:
            raise DataError("the file holds no rows", where=str(path), fix="give a dataset with at least one row")
        _check_columns(found[0], needs, path)
        rows += [(f"{stem}:{index}", row) for index, row in enumerate(found)]
        if 0 <= max_samples <= len(rows):
            return rows[:max_samples]
    return rows


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write rows as one parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        near = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) if near else f"the directory '{path.parent}' does not exist"
        raise DataError("no such file", where=str(path), fix=hint)
    reader = {".parquet": _parquet, ".json": _json, ".jsonl": _jsonl}.get(path.suffix)
    if reader is None:
        raise DataError(
            f"unknown kind of file '{path.suffix}'", where=str(path), fix="give .parquet, .json or .jsonl files"
        )
    try:
        rows = reader(path)
    except (OSError, pa.ArrowInvalid, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix="check how the file was made") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError("its entries are not objects", where=str(path), fix='one {"column": value} object a row')
    return rows


def _parquet(path: Path) -> list[Row]:
    return pq.read_table(path).to_pylist()


def _json(path: Path) -> list[Row]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, list) else [content]


def _jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _check_columns(row: Row, needs: Sequence[str], path: Path) -> None:
    for column in needs:
        if column not in row:
            raise DataError(
                f"no column '{column}'; the file has {', '.join(sorted(row))}",
                where=str(path),
                fix=did_you_mean(column, row),
            )

"""Read dataset files: parquet, json (a list of objects) and jsonl (one object per line)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.errors import DataError, did_you_mean
from hone.text import check_valid

SUFFIXES = (".parquet", ".json", ".jsonl")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row of a dataset file.

    Attributes:
        uid: ``<file stem>:<row number>``, the same in every run over the same files.
        where: file and row number, for error messages.
        values: column name to plain Python value.
    """

    uid: str
    where: str
    values: dict[str, Any]


def read_rows(
    files: Sequence[str | Path] | str | Path,
    *,
    required: Sequence[str],
    optional: Sequence[str] = (),
    max_rows: int = -1,
) -> list[Row]:
    """Read the named columns of all ``files``, in order.

    Args:
        files: paths of parquet, json or jsonl files.
        required: columns that every file must have.
        optional: columns that are read where they exist.
        optional: columns that are read if they exist.

    Raises:
        DataError: no file given, a file is missing, unreadable, of another format or empty, or a required column is missing.
    """
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    if not paths:
        raise DataError("no dataset file is given", fix="data.train_files=PATH (parquet, json or jsonl)")
    stems = [path.stem for path in paths]
    rows: list[Row] = []
    for number, path in enumerate(paths):
        name = path.stem if stems.count(path.stem) == 1 else f"{path.stem}.{number}"
        for index, values in enumerate(_records(path, required, optional)):
            if max_rows >= 0 and len(rows) >= max_rows:
                return rows
            rows.append(Row(f"{name}:{index}", f"{path}, row {index}", values))
    return rows


def read_all(files: Sequence[str | Path] | str | Path) -> list[Row]:
    """Read every column of all ``files``, in order.

    Raises:
        DataError: as :func:`read_rows`.
    """
    rows: list[Row] = []
    for path in [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]:
        rows += read_rows(path, required=(), optional=_columns(path))
    return rows


def _columns(path: Path) -> list[str]:
    """Return the columns of a file (for JSON, of all its rows); empty where :func:`read_rows` will report an error."""
    try:
        if path.suffix == ".parquet":
            return pq.read_schema(path).names
        records = _json_records(path, path.read_text(encoding="utf-8")) if path.suffix in SUFFIXES else []
    except (pa.ArrowException, OSError, UnicodeDecodeError, DataError):
        return []
    return list(dict.fromkeys(name for record in records if isinstance(record, dict) for name in record))


def _records(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        raise DataError(
            f"'{path}' is a directory, not a dataset file", fix=f"name the file, for example {path}/train.parquet"
        )
    if path.suffix not in SUFFIXES:
        raise DataError(f"'{path}' ends in '{path.suffix}'", fix=f"dataset files end in {', '.join(SUFFIXES)}")
    if not path.exists():
        raise DataError(f"dataset file '{path}' does not exist", fix=_nearby(path))
    return (_parquet if path.suffix == ".parquet" else _json)(path, required, optional)


def _parquet(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, required)
            if file.metadata.num_rows == 0:
                raise _empty(path)
            wanted = [name for name in dict.fromkeys((*required, *optional)) if name in columns]
            first = 0
            for batch in file.iter_batches(batch_size=4096, columns=wanted):
                try:
                    yield from batch.to_pylist()
                except UnicodeDecodeError:
                    raise _not_utf8(path, batch, first) from None
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _json(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    records = list(_json_records(path, text))
    if not records:
        raise _empty(path)
    may_be_invalid = _SURROGATE_ESCAPE.search(text) is not None
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(
                f"row {number} is a {type(record).__name__}, not an object",
                where=str(path),
                fix="make every row a JSON object whose keys are the columns",
            )
        _check_columns(path, record, required, row=number)
        values = {name: record[name] for name in (*required, *optional) if name in record}
        if may_be_invalid:
            check_valid(values, f"{path}, row {number}")
        yield values


def _json_records(path: Path, text: str) -> Iterable[Any]:
    if path.suffix == ".json":
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # several documents: JSON lines in a .json file
                raise _unreadable(path, error) from error
        else:
            return whole if isinstance(whole, list) else [whole]
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise _unreadable(path, f"line {number}: {error}") from error
    return records


def _check_columns(path: Path, columns: Iterable[str], required: Sequence[str], row: int | None = None) -> None:
    columns = list(columns)
    for name in required:
        if name not in columns:
            at = "" if row is None else f" in row {row}"
            raise DataError(
                f"no column '{name}'{at}; the columns are {', '.join(columns) or '(none)'}",
                where=str(path),
                fix=f"{did_you_mean(name, columns)} Rename the column, or name it with data.*_key.",
            )


def _not_utf8(path: Path, batch: pa.RecordBatch, first: int) -> DataError:
    """Return the error of the first row of a batch whose text is not UTF-8, as lone surrogates are not."""
    for number in range(batch.num_rows):
        try:
            batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            return DataError(
                f"the text is not UTF-8: {error.reason} (bytes {error.object[error.start : error.start + 3]!r})",
                where=f"{path}, row {first + number}",
                why="no tokenizer accepts it",
                fix="write the row again with valid text, for example with U+FFFD in place of these bytes",
            )
    raise AssertionError("unreachable")


def _empty(path: Path) -> DataError:
    return DataError("the file has no rows", where=str(path), fix="name a file with data, or make one: hone data make")


def _unreadable(path: Path, reason: object) -> DataError:
    return DataError(f"cannot be read as {path.suffix[1:]}: {reason}", where=str(path), fix="write the file again")


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder '{path.parent}' does not exist either; check the path"
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES)
    return did_you_mean(path.name, names) if names else f"'{path.parent}' holds no dataset file; check the path"

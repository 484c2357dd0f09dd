"""Datasets given as Python objects: rows, tables, frames, and `datasets.Dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hone.errors import DataError


def dataset_files(data: Any, folder: Path, name: str) -> str | list[str] | None:
    """Return the files of a dataset; rows in memory are written to ``folder``.

    Args:
        data: a path or a name of the hub, several, rows (mappings), a pyarrow table, a pandas frame, or a
            `datasets.Dataset`, whose arrow files are used without a copy.
        folder: directory for the file of rows in memory.
        name: stem of that file.

    Raises:
        DataError: the object is none of these, or has no rows.
    """
    if data is None or isinstance(data, str):
        return data
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(entry, str | Path) for entry in data):
        return [str(entry) for entry in data]
    files = _arrow_files(data)
    if files:
        return files
    table = _table(data)
    if table.num_rows == 0:
        raise DataError("the dataset has no rows", where=name, fix="give at least one row")
    return str(_write(table, folder / f"{name}.parquet"))


def _arrow_files(data: Any) -> list[str]:
    """Return the arrow files that hold exactly the rows of a `datasets.Dataset`; empty if there are none."""
    if getattr(data, "_indices", None) is not None:  # rows were chosen or shuffled
        return []
    files = [str(file["filename"]) for file in getattr(data, "cache_files", None) or []]
    return files if files and all(Path(file).is_file() for file in files) else []


def _table(data: Any) -> Any:
    import pyarrow as pa

    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "to_list") and hasattr(data, "features"):  # datasets.Dataset
        return pa.Table.from_pylist(data.to_list())
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return pa.Table.from_pylist(data.to_dict("records"))
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        rows = list(data)
        if all(isinstance(row, Mapping) for row in rows):
            return pa.Table.from_pylist([dict(row) for row in rows])
        if all(isinstance(row, str) for row in rows):
            return pa.Table.from_pylist([{"prompt": [{"role": "user", "content": row}]} for row in rows])
    raise DataError(
        f"a dataset cannot be a {type(data).__name__}",
        fix="give a path, a name of the hub, a list of rows (dicts with a column prompt), or a table",
    )


def _write(table: Any, file: Path) -> Path:
    import pyarrow.parquet as pq

    from hone.insight.run_files import disk_errors

    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.tmp")
        pq.write_table(table, scratch)
        scratch.replace(file)
    return file

"""Reader of the rollout archive.

>>> archive = open_archive(Path("runs/hone/demo"))                               # doctest: +SKIP
>>> for record in archive.records(archive.steps()[-1], ["uid", "score"]):        # doctest: +SKIP
...     print(record["uid"], record["score"])
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.images import ImageData, key_of, place_of
from hone.errors import HoneError
from hone.insight.archive.schema import BY_NAME, COLUMNS, JSON, ROWS_KEY, VERSION, VERSION_KEY
from hone.insight.archive.write import STEP_FILE, VOCABULARY
from hone.insight.run_files import atomic_file

FOLDER = "images"
SUFFIXES = (".png", ".jpg", ".webp", ".gif", ".image")


def name_of(key: int) -> str:
    return f"{key:011x}"


def keys_in(ids: Sequence[int]) -> list[int]:
    """Return the keys of the images in a row of token ids, one for each place, in order."""
    return [key_of(token) for token in ids if token < 0 and place_of(token) == 0]


def write_image(archive: Path, image: ImageData) -> None:
    """Write an image to an archive, unless it is there."""
    path = archive / FOLDER / f"{name_of(image.key)}{image.suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(image.content)


def find_image(archive: Path, key: int) -> ImageData | None:
    """Return the image of a key; None if the archive does not have it."""
    files = (archive / FOLDER / f"{name_of(key)}{suffix}" for suffix in SUFFIXES)
    file = next((file for file in files if file.is_file()), None)
    return None if file is None else ImageData(file.read_bytes())


def images_of(archive: Path, ids: Sequence[int]) -> tuple[ImageData, ...]:
    """Return the images of a row of token ids, one for each place, in order.

    Raises HoneError: the archive does not have one (code E-runs).
    """
    by_key: dict[int, ImageData] = {}
    for key in keys_in(ids):
        image = by_key.get(key) or find_image(archive, key)
        if image is None or image.key != key:
            raise HoneError(
                f"the image {name_of(key)} of a stored sample is missing",
                why="the model would not see what it saw in the run",
                where=str(archive / FOLDER),
                fix=f"copy the folder {FOLDER} of the run with its samples",
                code="E-runs",
            )
        by_key[key] = image
    return tuple(by_key[key] for key in keys_in(ids))


_MOST_BYTES, _MOST_GROWTH, _ROWS = 2**26, 500, 16
"""Bytes that a file of a step may become at least, as a multiple of its own, and the rows that are read between two looks."""
_BATCH = 256  # rows that are held as Python objects at once


@dataclass(frozen=True)
class Archive:
    """Rollouts of a run by step."""

    folder: Path

    def steps(self) -> list[int]:
        """Return the steps that have a file, in order."""
        return sorted(self._files())

    def records(
        self, step: int, columns: Sequence[str] | None = None, uid: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Return the sequences of a step one by one, in the order of the batch.

        Args:
            columns: names of the values in a record; None for all. Columns that are not named are not read.
            uid: prompt group; None for all.

        Raises:
            HoneError: the step has no file, or the file cannot be read (code E-runs).
        """
        return table_records(self.table(step, columns, uid))

    def table(self, step: int, columns: Sequence[str] | None = None, uid: str | None = None) -> pa.Table:
        """Return the sequences of a step as a table, in the order of the batch; columns of JSON are strings.

        ``step`` and ``columns`` and ``uid``: see :meth:`records`.

        Raises HoneError: see :meth:`records`.
        """
        names = [column.name for column in COLUMNS] if columns is None else list(columns)
        with self._open(step) as file:
            path = self._files().get(step, self.folder)
            try:
                table = _bounded(file, names if uid is None else list(dict.fromkeys([*names, "uid"])), path)
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # KeyError: a column is missing
                raise _unreadable(path, error) from None
        if uid is None:
            return table
        chosen = [row for row, name in enumerate(table["uid"].to_pylist()) if name == uid]
        return table.take(pa.array(chosen, pa.int64())).select(names)

    def complete(self, step: int) -> bool:
        """Return whether the file of a step has all its sequences, not only those of the prompts stored at every
        step.
        """
        with self._open(step) as file:
            return int(file.schema_arrow.metadata[ROWS_KEY]) == file.metadata.num_rows

    def vocabulary(self) -> list[str] | None:
        for folder in (self.folder, self.folder.parent / "rollouts"):
            if (folder / VOCABULARY).is_file():
                return pq.read_table(folder / VOCABULARY, columns=["text"])["text"].to_pylist()
        return None

    def _files(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((STEP_FILE.fullmatch(file.name), file) for file in self.folder.iterdir())
        return {int(match[1]): file for match, file in matches if match and file.is_file()}

    def _open(self, step: int) -> pq.ParquetFile:
        files = self._files()
        if step not in files:
            listed = ", ".join(map(str, sorted(files)[-12:])) or "there is none"
            raise HoneError(
                f"no samples of step {step}; the last steps with samples: {listed}",
                where=str(self.folder),
                fix=f"--step {min(files, key=lambda other: abs(other - step))}" if files else _STORE_ALL,
                code="E-runs",
            )
        try:
            file = pq.ParquetFile(files[step])
        except (pa.ArrowInvalid, OSError) as error:
            raise _unreadable(files[step], error) from None
        version = (file.schema_arrow.metadata or {}).get(VERSION_KEY, b"none").decode()
        if version != str(VERSION):
            raise HoneError(
                f"the file has version {version} of the rollout archive; this Hone reads version {VERSION}",
                where=str(files[step]),
                fix="read it with the Hone that wrote it, or import the source again: `hone archive import`",
                code="E-runs",
            )
        return file


_STORE_ALL = "trainer.rollout_dump_freq=1 writes all; a run of `hone sft` or `hone prefer` has none"


def _bounded(file: pq.ParquetFile, names: list[str], path: Path) -> pa.Table:
    """Return the columns of a file, some rows at a time.

    Raises ValueError: they are many times the size of the file, as samples never are: a small file could exhaust the memory.
    """
    most, size, parts = max(_MOST_BYTES, _MOST_GROWTH * path.stat().st_size), 0, []
    for part in file.iter_batches(_ROWS, columns=names):
        parts.append(part)
        size += part.nbytes
        if size > most:
            raise ValueError(f"its {path.stat().st_size} bytes become more than {most}")
    schema = parts[0].schema if parts else pa.schema([file.schema_arrow.field(name) for name in names])
    return pa.Table.from_batches(parts, schema).select(names)


def _unreadable(file: Path, error: Exception) -> HoneError:
    return HoneError(f"the file cannot be read: {error}", where=str(file), fix="remove the file", code="E-runs")


def open_archive(folder: Path) -> Archive:
    """Open an archive. ``folder``: ``rollouts`` or ``validation`` of a run directory, or a run directory, which means
    its rollouts. It may be empty.
    """
    return Archive(folder / "rollouts" if (folder / "rollouts").is_dir() else folder)


def table_records(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of the archive as records, with the values of its JSON columns."""
    decoded = [name for name in table.schema.names if BY_NAME[name].kind == JSON]
    for part in table.to_batches(_BATCH):
        for record in part.to_pylist():
            for name in decoded:
                record[name] = None if record[name] is None else json.loads(record[name])
            yield record


def require_archive(folder: Path) -> Archive:
    """Open an archive with at least one step. Raises HoneError: no step has a file (code E-runs)."""
    archive = open_archive(folder)
    if not archive.steps():
        raise HoneError(
            f"no samples in {archive.folder}",
            why="samples are written every trainer.rollout_dump_freq steps, and at each validation",
            fix=_STORE_ALL,
            code="E-runs",
        )
    return archive

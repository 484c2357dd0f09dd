"""Importers of the rollouts of other programs into the archive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from hone.apps.lab.importers.base import Importer, Row
from hone.apps.lab.importers.jsonl import JSONL, TRL, VERL
from hone.apps.lab.importers.prime_rl import PRIME_RL
from hone.apps.lab.importers.slime import SLIME
from hone.errors import DataError, did_you_mean
from hone.insight.archive.write import to_table, write_step
from hone.insight.run_directory import RunDirectory, RunStatus

IMPORTERS = {importer.name: importer for importer in (VERL, TRL, PRIME_RL, SLIME, JSONL)}
"""Importers by the name of their format, in the order in which a source is tried; the last takes any JSON lines."""
ALIASES = {"miles": "slime"}
AUTO = "auto"


def choose_importer(source: Path, name: str) -> tuple[Importer, list[Path]]:
    """Return the importer of a source, and the files that it reads; ``auto`` finds the format out."""
    name = ALIASES.get(name, name)
    if not source.exists():
        raise DataError(f"'{source}' does not exist", where="SRC", fix="name a file or folder with rollouts")
    if name != AUTO and name not in IMPORTERS:
        known = [AUTO, *IMPORTERS, *ALIASES]
        raise DataError(f"unknown format '{name}'", where="--format", fix=did_you_mean(name, known))
    tried = list(IMPORTERS.values()) if name == AUTO else [IMPORTERS[name]]
    for importer in tried:
        if files := importer.files(source):
            return importer, files
    formats = "; ".join(importer.about for importer in tried)
    raise DataError(
        f"no file of the format '{name}' in {source}", where="SRC", fix=f"the files of a format are: {formats}"
    )


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    out: Path  # run directory that was written
    format: str
    files: list[Path]  # files that were read
    rows: dict[int, int]  # sequences by step, those of validations left out
    validation: dict[int, int]  # sequences of validations by step


def import_rollouts(source: Path, out: Path, name: str = AUTO) -> Imported:
    """Convert rollouts of another program to a run directory that all readers open; ``out`` must not exist, or be empty."""
    importer, files = choose_importer(source, name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"'{out}' is not an empty folder", where="--out", fix="name a folder that does not exist")
    steps: dict[tuple[bool, int], list[dict[str, Any]]] = defaultdict(list)
    numbers: Counter[tuple[bool, int, str]] = Counter()
    for file in files:
        for place, row in _rows(importer, file):
            steps[place].append(_numbered(row, numbers, place))
    if not steps:
        raise DataError(f"no rollouts in {len(files)} files", where=str(source), fix="name files with rows")
    tables = {place: _table(steps[place], f"{source}, step {place[1]}") for place in sorted(steps)}
    directory = RunDirectory(out)
    directory.start(seed=0, config_yaml="{}\n")
    for (validation, step), table in tables.items():
        write_step(directory.validation if validation else directory.rollouts, step, table)
        if not validation:
            directory.log_metrics(step, _metrics(steps[validation, step]))
    directory.close()
    last = max(step for _, step in steps)
    directory.update_status(RunStatus.FINISHED, f"imported from {importer.name}: {source}", last_step=last)
    counts = [{step: len(rows) for (kind, step), rows in sorted(steps.items()) if kind is k} for k in (False, True)]
    return Imported(out, importer.name, files, *counts)


def _rows(importer: Importer, file: Path) -> Iterator[tuple[tuple[bool, int], Row]]:
    """Yield the rows of a file, each with whether it is of a validation and its step."""
    count = 0
    try:
        for row in importer.read(file):
            yield (row["fate"] == "validation", int(row["step"])), row
            count += 1
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(
            f"a row is not of the format '{importer.name}': {type(error).__name__}: {error}",
            where=f"{file}, after {count} sequences",
            fix="remove the row, or name another --format",
        ) from error


def _table(rows: list[Row], where: str) -> pa.Table:
    try:
        return to_table(rows)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the archive cannot hold a row: {error}", where=where, fix="correct its values") from error


def _numbered(row: dict[str, Any], numbers: Counter[Any], place: tuple[bool, int]) -> dict[str, Any]:
    """Return the row with its number within the group; segments of an episode share it."""
    if "index" in row:
        return row
    group, part = (*place, row["uid"]), row.get("part", 0)
    if part == 0:
        numbers[group] += 1
    return {**row, "index": max(0, numbers[group] - 1), "part": part}


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    scores = [row["score"] for row in rows if row.get("score") is not None]
    lengths = [len(row["response_ids"]) for row in rows if row.get("response_ids")]
    means = {"critic/score/mean": scores, "response_length/mean": lengths}
    return {name: fmean(values) for name, values in means.items() if values}

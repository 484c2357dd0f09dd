"""Archives for tests: records with the values that a test names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from hone.insight.archive.read import open_archive
from hone.insight.archive.write import to_table, write_step


def table(step: int, records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return records as a table; what the archive requires and a record lacks is filled in."""
    needed = {"step": step, "uid": "row", "index": 0, "part": 0, "fate": "trained", "text": ""}
    return to_table({**needed, **record} for record in records)


def archive(run: Path, step: int, records: Iterable[Mapping[str, Any]], *, rows: int | None = None) -> Path:
    """Write the rollouts of a step of a run."""
    return write_step(run / "rollouts", step, table(step, records), rows=rows)


def records(run: Path, step: int, folder: str = "rollouts") -> list[dict[str, Any]]:
    """Return the samples of a step, as a run wrote them."""
    return list(open_archive(run / folder).records(step))

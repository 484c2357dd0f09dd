"""Export of the archive as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from hone.insight.archive.read import require_archive
from hone.insight.run_files import atomic_file, jsonable


def export_records(folder: Path, out: Path, step: int | None = None) -> int:
    """Write the sequences of a step, or of all without one, as JSON lines; return their number."""
    archive, rows = require_archive(folder), 0
    with atomic_file(out) as file:
        for number in archive.steps() if step is None else [step]:
            for record in archive.records(number):
                line = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
                file.write(f"{line}\n".encode())
                rows += 1
    return rows

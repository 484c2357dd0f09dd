"""Cleaning of tool-call data: rows that pass into one file, the others with their reasons into another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.data.checks import check_calls
from hone.data.checks.tool_calls import PROBLEMS
from hone.data.files import read_all
from hone.errors import ConfigError, did_you_mean


@dataclass
class CleanCounts:
    """Numbers of rows: kept, rejected, and rejected by reason (a row may have several)."""

    kept: int = 0
    rejected: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "rejected": self.rejected, "reasons": dict(self.reasons)}


def clean_files(
    files: Sequence[str], out: Path, rejected: Path, *, messages_key: str, limit: int, allowed: Sequence[str] = ()
) -> CleanCounts:
    """Divide the rows of files by the soundness of their tool calls; columns are written as the files have them.

    Rejected rows have their uid, place and reasons; a tool result longer than ``limit`` characters is a reason. Kinds of defects in
    ``allowed`` reject no row.

    Raises:
        OSError: a file cannot be written.
    """
    for kind in allowed:
        if kind not in PROBLEMS:
            raise ConfigError(f"'{kind}' is not a kind of defect", fix=did_you_mean(kind, PROBLEMS), where="--allow")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{out} is neither .jsonl nor .parquet", fix=f"--out {out.with_suffix('.jsonl')}", where="--out"
        )
    rows = read_all(list(files))
    check = check_calls(rows, messages_key=messages_key, limit=limit)
    stored = read_all(list(files), as_stored=True)
    counts, kept, lines = CleanCounts(), [], []
    for number, row in enumerate(stored):
        bad = [d for d in check.defects.get(number, ()) if PROBLEMS[d.kind].stops and d.kind not in allowed]
        if not bad:
            kept.append(row.values)
            continue
        counts.reasons.update({defect.kind for defect in bad})
        reasons = [{"kind": defect.kind, "detail": defect.detail} for defect in bad]
        lines.append({"uid": row.uid, "where": row.where, "reasons": reasons, "row": row.values})
    counts.kept, counts.rejected = len(kept), len(lines)
    _write(kept, out)
    rejected.write_text(_json_lines(lines), encoding="utf-8")
    return counts


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text(_json_lines(rows), encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def _json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)

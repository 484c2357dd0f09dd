"""Table of the archive's columns in ``docs/archive.md``."""

from __future__ import annotations

from hone.insight.archive.schema import COLUMNS
from hone.text import replace_between

BEGIN = "<!-- columns, from hone/insight/archive/schema.py by scripts/make_docs: do not edit -->"
END = "<!-- to here -->"


def archive_page(existing: str) -> str:
    """Return the page with a new table between the markers; the rest is unchanged.

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    lines = ["| Column | Type | Meaning |", "|---|---|---|"]
    for column in COLUMNS:
        kind = column.kind + (", never null" if column.required else "")
        lines.append(f"| `{column.name}` | {kind} | {column.about} |")
    return replace_between(existing, BEGIN, END, "\n".join(lines))

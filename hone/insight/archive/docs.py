"""Table of the archive's columns in ``docs/archive.md``."""

from __future__ import annotations

from hone.insight.archive.schema import COLUMNS

BEGIN = "<!-- columns, from hone/insight/archive/schema.py by scripts/make_docs: do not edit -->"
END = "<!-- to here -->"


def archive_page(existing: str) -> str:
    """Return the page with a new table between the markers; the rest is unchanged.

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    if existing.count(BEGIN) != 1 or existing.count(END) != 1:
        raise ValueError(
            f"the page has {existing.count(BEGIN)} begin markers and {existing.count(END)} end markers, not one each"
        )
    head, _, rest = existing.partition(BEGIN)
    lines = ["", "| Column | Type | Meaning |", "|---|---|---|"]
    for column in COLUMNS:
        kind = column.kind + (", never null" if column.required else "")
        lines.append(f"| `{column.name}` | {kind} | {column.about} |")
    return "\n".join([head + BEGIN, *lines, "", END]) + rest.partition(END)[2]

"""The tables of docs/coming-from-trl.md: what each name of TRL is in Hone."""

from __future__ import annotations

import re

from hone.config.migration import trl_table
from hone.config.migration.entries import described
from hone.config.trees import TREES
from hone.text import replace_between

BEGIN = "<!-- Generated from hone/config/migration/trl.yaml by scripts/make_docs: do not edit from here -->"
END = "<!-- names: to here -->"


def trl_page(existing: str) -> str:
    """Return the page with new tables between the markers; the rest is unchanged."""
    lines: list[str] = []
    seen: set[tuple[str, str]] = set()
    for command, tree in TREES.items():
        rows: dict[str, list[str]] = {}
        for name, entry in trl_table(tree).paths().items():
            text = described(entry)
            mark = (
                name,
                re.sub(r"[\w.]+\.(?=\w)", "", text),
            )  # without the blocks of keys, which differ between programs
            if mark not in seen:
                seen.add(mark)
                text = re.sub(r"^(Another name of|Taken as) ([\w.]+(?:, [\w.]+\.\w+)*)(?=[.:])", r"`\2`", text)
                rows.setdefault(text.replace("|", "&#124;"), []).append(f"`{name}`")
        lines += [f"### `hone {command}`", "", "| TRL | Hone |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
        lines.append("")
    return replace_between(existing, BEGIN, END, "\n".join(["", *lines]))

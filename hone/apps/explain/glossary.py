"""The glossary: terms of the field with their meaning, read from ``glossary.yaml``, and its page."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("glossary.yaml")
_HEAD = """# Glossary

<!-- Generated from hone/apps/explain/glossary.yaml by scripts/make_docs. Do not edit. -->

The terms of the field as Hone uses them. Code, messages and pages use these words and no others for the same thing; `scripts/lint` runs
[`scripts/vocabulary.py`](../scripts/vocabulary.py), which lists words to avoid with the standard one for each.

`hone explain TERM` prints an entry of this page, and describes any configuration key, metric, code, detector or method:

```bash
hone explain staleness
hone explain rollout.n
hone explain actor/pg_clipfrac
hone explain entropy_collapse
```
"""


@dataclass(frozen=True)
class Term:
    """A term of the glossary."""

    name: str  # the term; two terms that are explained together are separated by a comma
    meaning: str  # one to three sentences
    section: str  # heading of the page
    also: tuple[str, ...] = ()  # other names
    page: str = ""  # page below docs/, or empty
    keys: tuple[str, ...] = ()  # configuration keys that belong to it
    metrics: tuple[str, ...] = ()  # metrics that measure it

    @property
    def names(self) -> tuple[str, ...]:
        """The term and its other names."""
        return (self.name, *self.also)


@functools.cache
def glossary() -> tuple[Term, ...]:
    import yaml

    sections: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return tuple(
        Term(
            name,
            entry["meaning"],
            section,
            **{part: tuple(entry.get(part, ())) for part in ("also", "keys", "metrics")},
            page=entry.get("page", ""),
        )
        for section, entries in sections.items()
        for name, entry in entries.items()
    )


def glossary_page() -> str:
    """Return the page ``docs/glossary.md``."""
    lines, section = [_HEAD], ""
    for term in glossary():
        if term.section != section:
            section = term.section
            lines += [
                *([""] if len(lines) > 1 else []),
                f"## {section}",
                "",
                "| Term | Meaning | See |",
                "|---|---|---|",
            ]
        names = term.name + (f" ({', '.join(term.also)})" if term.also else "")
        see = [f"[{term.page}]({term.page})"] if term.page else []
        see += [f"`{name}`" for name in (*term.keys, *term.metrics)]
        cells = (names, term.meaning, ", ".join(see))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

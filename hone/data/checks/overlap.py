"""Do rows occur more than once: within the training rows, or in training and validation; and are some kinds rare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hone.data.files import Row
from hone.data.messages import plain
from hone.errors import DataError, Finding

MANY_DUPLICATES = 0.05
"""Share of repeated prompts from which a warning is given."""


def duplicates(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Warn when more than 5 % of the prompts in column ``key`` occur before in the same rows."""
    counts = Counter(_same(row.values.get(key)) for row in rows)
    repeated = len(rows) - len(counts)
    if repeated > MANY_DUPLICATES * len(rows):
        often = max(counts.values())
        yield _warning(
            f"{repeated} of {len(rows)} training prompts ({repeated / len(rows):.0%}) are repetitions of others "
            f"(one occurs {often} times)",
            why="they weigh more than the others, and a pass over the data visits them several times",
            fix="remove the repetitions",
        )


def overlap(train: Sequence[Row], val: Sequence[Row], key: str) -> Iterator[Finding]:
    """Warn when prompts of the validation rows occur in the training rows."""
    known = {_same(row.values.get(key)) for row in train} if val else set()
    seen = [row for row in val if _same(row.values.get(key)) in known]
    if seen:
        yield _warning(
            f"{len(seen)} of {len(val)} validation prompts ({len(seen) / len(val):.0%}) occur in the training data",
            why="validation would measure memory too",
            fix="remove them from one of the two",
            where=seen[0].where,
        )


def rare_sources(rows: Sequence[Row], key: str, batch_size: int) -> Iterator[Finding]:
    """Warn about kinds of problem that a batch meets less than once in ten steps."""
    counts = Counter(str(row.values.get(key)) for row in rows)
    rare = {name: count for name, count in counts.items() if count * batch_size < 0.1 * len(rows)}
    if rare:
        shown = ", ".join(f"'{name}' ({count})" for name, count in sorted(rare.items(), key=lambda item: item[1])[:5])
        yield _warning(
            f"{len(rare)} of {len(counts)} data sources are rare among {len(rows)} rows: {shown}",
            why=f"at {batch_size} prompts a step the policy meets them less than once in ten steps",
            fix="more rows of them, or leave them out",
        )


def text_of(value: Any) -> str:
    """A prompt as text that is the same for equal prompts."""
    return value if isinstance(value, str) else json.dumps(plain(value), sort_keys=True, default=str)


def _same(value: Any) -> int:
    """A number that is the same for equal prompts; of messages, role and content count."""
    if isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("content"), str) for item in value
    ):
        return hash(tuple((item.get("role"), item["content"]) for item in value))
    return hash(text_of(value))


def _warning(what: str, *, why: str, fix: str, where: str = "") -> Finding:
    return Finding(DataError(what, why=why, fix=fix, where=where, code="R47"), stops=False)

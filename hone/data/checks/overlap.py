"""Check for repeated rows, within the training rows or in training and validation, and for rare kinds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hone.data.files import Row
from hone.data.messages import plain
from hone.errors import DataError, Finding

MANY_DUPLICATES = 0.05  # share of repeated prompts above which a warning is given


def duplicates(rows: Sequence[Row], key: str, image_key: str) -> Iterator[Finding]:
    """Warn when more than 5 % of the prompts in column ``key``, with their images, repeat an earlier row."""
    counts = Counter(_same(row, key, image_key) for row in rows)
    repeated = len(rows) - len(counts)
    if repeated > MANY_DUPLICATES * len(rows):
        often = max(counts.values())
        yield _warning(
            f"{repeated} of {len(rows)} training prompts ({repeated / len(rows):.0%}) repeat an earlier one "
            f"(one occurs {often} times)",
            why="repeated prompts weigh more than others, and a pass over the data visits them several times",
            fix="remove the repetitions",
        )


def overlap(train: Sequence[Row], val: Sequence[Row], key: str, image_key: str) -> Iterator[Finding]:
    """Warn when prompts of the validation rows, with their images, occur in the training rows."""
    train_keys = {_same(row, key, image_key) for row in train} if val else set()
    repeated = [row for row in val if _same(row, key, image_key) in train_keys]
    if repeated:
        yield _warning(
            f"{len(repeated)} of {len(val)} validation prompts ({len(repeated) / len(val):.0%}) occur in the training data",
            why="validation would also measure memorization",
            fix="remove them from one of the two",
            where=repeated[0].where,
        )


def rare_sources(rows: Sequence[Row], key: str, batch_size: int) -> Iterator[Finding]:
    """Warn about data sources that occur in a batch less than once in ten steps."""
    counts = Counter(str(row.values.get(key)) for row in rows)
    rare = {name: count for name, count in counts.items() if count * batch_size < 0.1 * len(rows)}
    if rare:
        shown = ", ".join(f"'{name}' ({count})" for name, count in sorted(rare.items(), key=lambda item: item[1])[:5])
        yield _warning(
            f"{len(rare)} of {len(counts)} data sources are rare among {len(rows)} rows: {shown}",
            why=f"with {batch_size} prompts per step, the policy gets them less than once in ten steps",
            fix="more rows of them, or leave them out",
        )


def text_of(value: Any) -> str:
    """Return a prompt as text, equal for equal prompts."""
    return value if isinstance(value, str) else json.dumps(plain(value), sort_keys=True, default=str)


def _same(row: Row, key: str, image_key: str) -> int:
    """Return a number that is equal for equal prompts with equal images; for messages, role and content count."""
    value, images = row.values.get(key), plain(row.values.get(image_key))
    if isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("content"), str) for item in value
    ):
        text = hash(tuple((item.get("role"), item["content"]) for item in value))
    else:
        text = hash(text_of(value))
    return hash((text, _image_hash(images))) if images else text


def _image_hash(value: Any) -> int:
    if isinstance(value, dict):
        return hash(tuple((name, _image_hash(value[name])) for name in sorted(value)))
    return hash(tuple(map(_image_hash, value)) if isinstance(value, list) else value)


def _warning(what: str, *, why: str, fix: str, where: str = "") -> Finding:
    return Finding(DataError(what, why=why, fix=fix, where=where, code="R47"), stops=False)

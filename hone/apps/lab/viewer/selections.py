"""Answers of a filter as a dataset: conversations for `hone sft`, or pairs for `hone prefer`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.apps.lab.viewer.index import Rows
from hone.apps.lab.viewer.run import Archived, plain
from hone.errors import HoneError

FORMS = ("sft", "pairs")
MOST = 20_000
"""Most answers that are read."""
_COLUMNS = (
    "step",
    "uid",
    "index",
    "part",
    "data_source",
    "prompt",
    "messages",
    "text",
    "ground_truth",
    "score",
    "episode",
)


@dataclass(frozen=True)
class Download:
    name: str
    text: str


def selection(archived: Archived, query: str, form: str) -> Download:
    """Return the answers that a query leaves as JSON lines.

    ``sft``: a row per answer with its whole conversation. ``pairs``: a row per group with its best and its worst answer among those of the
    query, if their scores differ. Only the first segment of an episode counts.
    """
    if form not in FORMS:
        raise HoneError(f"no form '{form}'", fix=f"one of {', '.join(FORMS)}", code="E-view-selection")
    rows = archived.rows()
    kept = archived.matching(rows, query) & (rows["part"] == 0)
    if not 0 < kept.sum() <= MOST:
        raise HoneError(
            f"the filter leaves {int(kept.sum())} answers",
            fix=f"a filter that leaves 1 to {MOST}",
            code="E-view-selection",
        )
    records = _records(archived, rows, kept)
    lines = _conversations(records) if form == "sft" else _pairs(records)
    return Download(f"{form}.jsonl", "".join(json.dumps(plain(line), ensure_ascii=False) + "\n" for line in lines))


def _records(archived: Archived, rows: Rows, kept: np.ndarray) -> Iterator[dict[str, Any]]:
    for step in np.unique(rows["step"][kept]).tolist():
        positions = set(rows.position[kept & (rows["step"] == step)].tolist())
        for position, record in enumerate(archived.index.archive.records(int(step), _COLUMNS)):
            if position in positions:
                yield record


def _prompt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return record["messages"] or [{"role": "user", "content": record["prompt"] or ""}]


def _reply(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = (record["episode"] or {}).get("messages")
    return said or [{"role": "assistant", "content": record["text"]}]


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"data_source": record["data_source"], "step": record["step"], "uid": record["uid"]}


def _conversations(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in records:
        origin = _origin(record) | {"index": record["index"], "score": record["score"]}
        yield {"messages": [*_prompt(record), *_reply(record)], **origin}


def _pairs(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["score"] is not None:
            groups.setdefault((record["step"], record["uid"]), []).append(record)
    for answers in groups.values():
        best, worst = max(answers, key=lambda record: record["score"]), min(answers, key=lambda record: record["score"])
        if best["score"] > worst["score"]:
            sides = {"prompt": _prompt(best), "chosen": _reply(best), "rejected": _reply(worst)}
            yield sides | _origin(best) | {"chosen_score": best["score"], "rejected_score": worst["score"]}

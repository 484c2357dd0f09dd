"""Samples of a run, read back from ``rollouts/`` or ``validation/`` for a person to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.insight.archive.read import require_archive


@dataclass(frozen=True)
class SampleQuery:
    """Choice of samples."""

    step: int | None = None  # step to read; None means the newest with samples
    worst: int | None = None  # number of samples with the lowest scores; None means no such choice
    best: int | None = None  # the same for the highest
    contains: str | None = None  # text that prompt or response contains, in any case
    uid: str | None = None  # dataset row
    limit: int = 5  # most samples when neither ``worst`` nor ``best`` is given, spread evenly over the step


@dataclass(frozen=True)
class SamplesOfStep:
    """Samples of one step."""

    step: int
    shown: list[dict[str, Any]]  # chosen samples, as :func:`hone.insight.records.trajectory_record` has them
    matching: int  # number of samples that ``contains`` and ``uid`` leave
    total: int


def read_samples(folder: Path, query: SampleQuery) -> SamplesOfStep:
    """Return the chosen samples of a step, from ``rollouts`` or ``validation`` of a run directory."""
    archive = require_archive(folder)
    step = archive.steps()[-1] if query.step is None else query.step
    total, matching = 0, []
    for record in archive.records(step):
        total += 1
        if _matches(record, query):
            matching.append(record)
    return SamplesOfStep(step, _chosen(matching, query), len(matching), total)


def _matches(record: Mapping[str, Any], query: SampleQuery) -> bool:
    if query.uid is not None and record["uid"] != query.uid:
        return False
    if query.contains is None:
        return True
    text = f"{record.get('prompt') or ''}\n{json.dumps(record.get('messages'), ensure_ascii=False)}\n{record['text']}"
    return query.contains.casefold() in text.casefold()


def _chosen(records: list[dict[str, Any]], query: SampleQuery) -> list[dict[str, Any]]:
    if query.worst is None and query.best is None:
        return spread(records, query.limit)
    chosen: list[dict[str, Any]] = []
    judged = sorted((record for record in records if record["score"] is not None), key=lambda record: record["score"])
    if query.worst:
        chosen += judged[: query.worst]
    if query.best:
        chosen += judged[::-1][: query.best]
    return chosen


def spread(records: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return at most ``count`` records at even distances, the first included."""
    if len(records) <= count:
        return list(records)
    return [records[index * len(records) // count] for index in range(count)]

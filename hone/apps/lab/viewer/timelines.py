"""Timeline of the processes of a run around one step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.chrome_trace import nested_lanes
from hone.insight.timeline import DoneSpan, ProcessTimeline, read_timeline

_STEP = re.compile(r"step (\d+)")
MOST_SPANS = 3000
"""Spans that are shown of a step; beyond it the longest ones are kept."""


def step_timeline(run: Path, step: int | None) -> dict[str, Any]:
    """Return what every process did during a step, the newest without one.

    ``steps`` (all recorded ones), ``step``, ``seconds`` (length of the step), ``left_out`` (spans that are too many to show) and
    ``processes``: ``name`` and ``rows``, each a list of spans ``[what, begin, end, waits]`` in seconds since the step began. Each
    span of a row was begun within the one above it.
    """
    processes = read_timeline(run)
    spans_of_steps = {
        int(match[1]): span
        for process in processes
        if process.role == "driver"
        for span in process.spans
        if (match := _STEP.fullmatch(span.what))
    }
    if not spans_of_steps:
        return {"steps": [], "step": None, "seconds": 0.0, "left_out": 0, "processes": []}
    step = step if step in spans_of_steps else max(spans_of_steps)
    window = spans_of_steps[step]
    shown = [[span for span in process.spans if _overlaps(span, window)] for process in processes]
    lengths = sorted((span.end - span.begin for spans in shown for span in spans), reverse=True)
    shortest = lengths[MOST_SPANS] if len(lengths) > MOST_SPANS else -1.0
    kept = [[span for span in spans if span.end - span.begin > shortest] for spans in shown]
    return {
        "steps": sorted(spans_of_steps),
        "step": step,
        "seconds": window.end - window.begin,
        "left_out": sum(map(len, shown)) - sum(map(len, kept)),
        "processes": [
            {"name": process.name, "rows": _rows(process, spans, window)}
            for process, spans in zip(processes, kept, strict=True)
            if spans
        ],
    }


def _overlaps(span: DoneSpan, window: DoneSpan) -> bool:
    return span.begin < window.end and span.end > window.begin


def _rows(process: ProcessTimeline, spans: Sequence[DoneSpan], window: DoneSpan) -> list[list[list[Any]]]:
    rows: list[list[list[Any]]] = []
    for thread in dict.fromkeys(span.thread for span in process.spans):
        for lane in nested_lanes(span for span in spans if span.thread == thread):
            below: list[list[list[Any]]] = []
            ends: list[float] = []  # of the spans around the current one
            for span in lane:
                while ends and ends[-1] <= span.begin:
                    ends.pop()
                if len(ends) == len(below):
                    below.append([])
                begin, end = max(span.begin, window.begin), min(span.end, window.end)
                below[len(ends)].append([span.what, begin - window.begin, end - window.begin, span.waits])
                ends.append(span.end)
            rows += below
    return rows

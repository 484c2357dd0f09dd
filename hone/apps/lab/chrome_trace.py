"""Timeline of a run as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hone.insight.run_files import disk_errors, write_atomically
from hone.insight.timeline import DoneSpan, ProcessTimeline


def chrome_trace(processes: Sequence[ProcessTimeline]) -> dict[str, Any]:
    """Return a timeline in the Chrome trace format.

    Times are microseconds since the first span. Spans of a thread that overlap without nesting, as those of tasks of an event loop
    do, are shown on several lines. The beginning of a step is an instant event of all processes.
    """
    origin = min((span.begin for process in processes for span in process.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        name = f"{process.name} (process {process.pid} on {process.host})"
        events.append(_named("process_name", pid, 0, name))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        tid = 0
        for number, thread in enumerate(dict.fromkeys(span.thread for span in process.spans), start=1):
            lanes = nested_lanes(span for span in process.spans if span.thread == thread)
            for lane, spans in enumerate(lanes, start=1):
                tid += 1
                events.append(_named("thread_name", pid, tid, f"thread {number}" + f", line {lane}" * (len(lanes) > 1)))
                events += (_complete(span, origin, pid, tid) for span in spans)
        if process.role == "driver":
            events += (
                {"ph": "i", "name": span.what, "ts": _micro(span.begin - origin), "pid": pid, "tid": 1, "s": "g"}
                for span in process.spans
                if span.what.startswith("step ")
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(processes: Sequence[ProcessTimeline], path: Path) -> None:
    with disk_errors(path):
        write_atomically(path, json.dumps(chrome_trace(processes), ensure_ascii=False))


def nested_lanes(spans: Iterable[DoneSpan]) -> list[list[DoneSpan]]:
    """Distribute spans, sorted by begin and then the longest first, over lanes in which any two nest or are disjoint."""
    lanes: list[list[DoneSpan]] = []
    open_ends: list[list[float]] = []  # of each lane, the ends of the spans around the current time, the innermost last
    for span in spans:
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                lane.append(span)
                ends.append(span.end)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end])
    return lanes


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _complete(span: DoneSpan, origin: float, pid: int, tid: int) -> dict[str, Any]:
    begin = _micro(span.begin - origin)
    return {
        "ph": "X",
        "name": span.what,
        "cat": "wait" if span.waits else "work",
        "ts": begin,
        "dur": _micro(span.end - origin) - begin,
        "pid": pid,
        "tid": tid,
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

"""Report of a hang: which process waits for which, the culprit, and the stacks of all processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hone.cluster.wait_graph import Diagnosis, diagnose
from hone.insight.activity import Record
from hone.insight.stacks import ThreadStacks, collect


def stacks_of(records: Sequence[Record]) -> dict[int, ThreadStacks]:
    """Return the stacks of the processes that are alive on this machine, by pid."""
    local = [record for record in records if record.is_here() and record.is_alive()]
    return collect(
        {record.pid: record.stacks_file for record in local}, {record.pid: record.thread for record in local}
    )


def examine(records: Sequence[Record], *, seconds: float, limit: float) -> tuple[Diagnosis, str, str]:
    """Request the stacks of all processes and diagnose the hang.

    Args:
        records: records of all processes of the run.
        seconds: seconds without any progress.
        limit: trainer.watchdog_seconds.

    Returns:
        The diagnosis, a summary to show, and the whole report to store.
    """
    stacks = stacks_of(records)
    diagnosis = diagnose(records, stacks)
    head = _head(diagnosis, stacks, seconds, limit)
    return diagnosis, head, "\n".join([head, "", *_all_stacks(records, stacks)])


def graph(diagnosis: Diagnosis) -> list[str]:
    """Return one line per process: its activity, what it waits for, and since when."""
    now, lines = time.time(), []
    width = max((len(wait.record.name) for wait in diagnosis.waits), default=0)
    for wait in diagnosis.waits:
        mark = "*" if wait.record in diagnosis.culprits else " "
        on = f" -> {', '.join(wait.on)}" if wait.on else ""
        moved = f"{max(0.0, now - wait.record.moved):.0f} s"
        lines.append(f" {mark} {wait.record.name:<{width}}  [{wait.record.stage}] {wait.how}{on}, for {moved}")
    return lines


def _head(diagnosis: Diagnosis, stacks: Mapping[int, ThreadStacks], seconds: float, limit: float) -> str:
    lines = [f"HANG: no process made progress for {seconds:.0f} s (trainer.watchdog_seconds={limit:g})"]
    for record in diagnosis.culprits:
        lines.append(f"Culprit: {record.name} (pid {record.pid} on {record.host}), in '{record.stage}'")
    lines += [f"Why: {diagnosis.reason}", "", "Waits (* the culprit):", *graph(diagnosis)]
    for record in diagnosis.culprits:
        if (thread_stacks := stacks.get(record.pid)) and thread_stacks.frames:
            lines += ["", f"Stack of {record.name} (most recent call first):"]
            lines += [f"    {frame}" for frame in thread_stacks.frames[:12]]
    return "\n".join(lines)


def _all_stacks(records: Sequence[Record], stacks: Mapping[int, ThreadStacks]) -> list[str]:
    lines = []
    for record in records:
        thread_stacks = stacks.get(record.pid)
        lines.append(f"--- stacks of {record.name} (pid {record.pid} on {record.host})")
        if thread_stacks is None:
            lines.append("not available: " + ("it is dead" if not record.is_alive() else f"it runs on {record.host}"))
        elif thread_stacks.text:
            lines.append(
                thread_stacks.text.replace(f"{record.thread:#018x}", f"{record.thread:#018x} [{record.stage}]").rstrip()
            )
        else:
            lines.append(f"not available: {thread_stacks.problem}")
        lines.append("")
    return lines

"""Timeline of a run: the finished spans of every process.

        <run>/timeline/<role>-<rank>.<pid>.jsonl        newest spans of a process
        <run>/timeline/<role>-<rank>.<pid>.jsonl.old    those before, once the file was full

The first line of a file describes the process; every other line is one span, ``[what, begin, end, thread, waits]``, with wall times in
seconds. Only the standard library is used, see :mod:`hone.insight.activity`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "timeline"
LIMIT_BYTES = 8_000_000
"""Size at which a file of spans is set aside; a process keeps at most two such files, the newest spans in both."""
_FLUSH_SECONDS = 1.0


class DoneSpan(NamedTuple):
    """One finished activity."""

    what: str  # work that was done, or thing that was waited for
    begin: float  # wall times in seconds
    end: float
    thread: int  # identity of the thread that began it
    waits: bool  # whether it was a wait for something outside the process


@dataclass(frozen=True)
class ProcessTimeline:
    """Finished spans of one process, in order of their begin; of two with the same begin the longer one is first."""

    role: str
    rank: int | None
    pid: int
    host: str
    spans: Sequence[DoneSpan]

    @property
    def name(self) -> str:
        return self.role if self.rank is None else f"{self.role}[{self.rank}]"


class Recorder:
    """Writer of the spans of this process. Its caller serialises the calls.

    Args:
        path: file of the process; spans are appended to it.
        process: ``role``, ``rank``, ``pid`` and ``host``, the first line of the file.
    """

    def __init__(self, path: Path, process: Mapping[str, Any]) -> None:
        self._path, self._head = path, json.dumps(dict(process)) + "\n"
        self._lines: list[DoneSpan] = []
        self._written_at = time.monotonic()

    def add(self, what: str, begin: float, thread: int, waits: bool) -> None:
        """Add a span that ends now; it reaches the file within a second of the next one, or at :meth:`write`."""
        end = time.time()
        self._lines.append(DoneSpan(what, min(begin, end), end, thread, waits))
        if time.monotonic() - self._written_at > _FLUSH_SECONDS:
            self.write()

    def write(self) -> None:
        """Append the spans since the last call. A disk that refuses them costs these spans and not the run."""
        self._written_at = time.monotonic()
        lines, self._lines = self._lines, []
        if not lines:
            return
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                size = file.tell()
                file.write(text if size else self._head + text)
            if size + len(text) > LIMIT_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".old"))
        except OSError:
            return


def clear(run: Path) -> None:
    for path in (run / FOLDER).glob("*.jsonl*"):
        path.unlink(missing_ok=True)


def read_timeline(run: Path) -> list[ProcessTimeline]:
    """Return the timeline of every process of a run, the driver first; empty if none was recorded."""
    spans_of: dict[tuple[str, int, int, str], list[DoneSpan]] = {}
    for path in sorted((run / FOLDER).glob("*.jsonl*")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a process that was killed leaves half a line
        process = _parsed(lines[0]) if lines else None
        if process is None:
            continue
        rank = -1 if process["rank"] is None else process["rank"]
        spans = spans_of.setdefault((process["role"], rank, process["pid"], process["host"]), [])
        spans += (DoneSpan(*values) for line in lines[1:] if (values := _parsed(line)) is not None)
    return [
        ProcessTimeline(role, None if rank < 0 else rank, pid, host, sorted(spans, key=lambda s: (s.begin, -s.end)))
        for (role, rank, pid, host), spans in sorted(
            spans_of.items(), key=lambda item: (item[0][0] != "driver", item[0])
        )
    ]


def _parsed(line: str) -> Any:
    """Return the value of a line; None if a full disk cut it, so that the next line follows in it."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None

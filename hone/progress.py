"""Progress of a long loop, on stderr: a bar on a terminal, otherwise a line every few seconds.

>>> import io
>>> stream = io.StringIO()
>>> with progress("rows", 3, every=0, stream=stream) as bar:
...     for _ in range(3):
...         bar.advance()
>>> stream.getvalue().splitlines()[-1].startswith("rows: 3 of 3")
True
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

LINE_SECONDS = 5.0
"""Time between two lines where there is no terminal."""


class Bar(ABC):
    """Progress of one loop."""

    @abstractmethod
    def advance(self, count: int = 1) -> None:
        """Count items that are done."""

    @abstractmethod
    def close(self) -> None:
        """End the display."""


@contextmanager
def progress(what: str, total: int, *, every: float = LINE_SECONDS, stream: TextIO | None = None) -> Iterator[Bar]:
    """Show the progress of a loop while the block runs.

    Args:
        what: items of the loop ("answers").
        total: number of items.
        every: seconds between two lines where there is no terminal; a shorter loop writes none.
        stream: output; None means stderr.
    """
    output: TextIO = stream or sys.stderr
    bar: Bar = _TerminalBar(what, total, output) if output.isatty() else _Lines(what, total, output, every)
    try:
        yield bar
    finally:
        bar.close()


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items of a loop and show its progress."""
    with progress(what, total) as bar:
        for item in items:
            yield item
            bar.advance()


class _TerminalBar(Bar):
    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        columns: tuple[Any, ...] = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[rate]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
        )
        self._started, self._done = time.monotonic(), 0
        self._progress = rich_progress.Progress(
            *columns, console=Console(file=stream), redirect_stdout=False, transient=True
        )
        self._task = self._progress.add_task(what, total=total, rate="")
        self._progress.start()

    def advance(self, count: int = 1) -> None:
        self._done += count
        rate = _rate(self._done, time.monotonic() - self._started)
        self._progress.update(self._task, advance=count, rate=rate)

    def close(self) -> None:
        self._progress.stop()


class _Lines(Bar):
    def __init__(self, what: str, total: int, stream: TextIO, every: float) -> None:
        self._what, self._total, self._stream, self._every = what, total, stream, every
        self._started = self._written = time.monotonic()
        self._done = 0

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._written < self._every:
            return
        self._written, seconds = now, now - self._started
        left = seconds / self._done * (self._total - self._done)
        rate = _rate(self._done, seconds)
        self._stream.write(f"{self._what}: {self._done} of {self._total}, {rate}, {_clock(left)} left\n")
        self._stream.flush()

    def close(self) -> None:
        pass


def _rate(done: int, seconds: float) -> str:
    per_second = done / seconds if seconds > 0 else 0.0
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{60 * per_second:.1f}/min"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

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
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any, TextIO, TypeVar

T = TypeVar("T")

LINE_SECONDS = 5.0
"""Time between two lines where there is no terminal."""


ON_DONE: ContextVar[Callable[[int], None]] = ContextVar("on_done", default=lambda count: None)  # noqa: B039 - a function
"""Function of the number of episodes, or rows of an inference, that ended in this process."""


@contextmanager
def counting(on_done: Callable[[int], None]) -> Iterator[None]:
    """Let what ends in this process while the block runs call the function, see :data:`ON_DONE`."""
    token = ON_DONE.set(on_done)
    try:
        yield
    finally:
        ON_DONE.reset(token)


class Bar(ABC):
    """Progress of one loop, of which ``done`` items have ended."""

    done = 0
    ended = False

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total

    def advance(self, count: int = 1) -> None:
        """Count items that are done; 0 shows that the loop is alive."""
        self.done = min(self._total, self.done + count)
        self._show(count)

    @abstractmethod
    def _show(self, count: int) -> None:
        """Show the progress after ``count`` more items."""

    def close(self) -> None:
        """End the display."""
        self.ended = True


class Saying(Bar):
    """Progress as a text such as ``validating 12/60``, for a caller that has a line for it."""

    def __init__(self, what: str, total: int, say: Callable[[str], None]) -> None:
        super().__init__(what, total)
        self._say = say
        self.advance(0)

    def _show(self, count: int) -> None:
        self._say(f"{self._what} {self.done}/{self._total}")


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
    bar: Bar = _TerminalBar(what, total, output) if output.isatty() else Lines(what, total, output, every)
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

        super().__init__(what, total)
        columns: tuple[Any, ...] = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[rate]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
        )
        self._started = time.monotonic()
        self._progress = rich_progress.Progress(
            *columns, console=Console(file=stream), redirect_stdout=False, transient=True
        )
        self._task = self._progress.add_task(what, total=total, rate="")
        self._progress.start()

    def _show(self, count: int) -> None:
        rate = _rate(self.done, time.monotonic() - self._started)
        self._progress.update(self._task, advance=count, rate=rate)

    def close(self) -> None:
        super().close()
        self._progress.stop()


class Lines(Bar):
    """Progress as a line every few seconds, also while no item ends."""

    def __init__(self, what: str, total: int, stream: IO[str], every: float = LINE_SECONDS) -> None:
        super().__init__(what, total)
        self._stream, self._every = stream, every
        self._started, self._end = time.monotonic(), threading.Event()
        if every:
            threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def _tick(self) -> None:
        while not self._end.wait(self._every):
            self._write()

    def _show(self, count: int) -> None:
        if not self._every:
            self._write()

    def _write(self) -> None:
        seconds = time.monotonic() - self._started
        pace = f"{_clock(seconds)} so far"
        if self.done:
            pace = f"{_rate(self.done, seconds)}, {_clock(seconds / self.done * (self._total - self.done))} left"
        self._stream.write(f"{self._what}: {self.done} of {self._total}, {pace}\n")
        self._stream.flush()

    def close(self) -> None:
        super().close()
        self._end.set()


def _rate(done: int, seconds: float) -> str:
    per_second = done / seconds if seconds > 0 else 0.0
    return f"{per_second:.1f}/s" if per_second >= 1 else f"{60 * per_second:.1f}/min"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

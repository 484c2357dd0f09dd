"""Output of a worker process, shown on standard error up to a number of bytes a minute."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator

WINDOW = 60.0
"""Seconds after which a worker may print as much again."""
_CHUNK = 1 << 16
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0

logger = logging.getLogger("hone.rewards")


class CapturedOutput:
    """Pipe that takes the standard output and error of a worker, and the thread that shows it.

    What is over the limit is read, counted and dropped; the count is logged after the window and at the worker's end.

    Args:
        name: name of the worker, for the log.
        limit_kb: KiB shown a minute; None shows everything.

    Attributes:
        descriptor: end for the worker.
        cut: bytes that were not shown, in all.
    """

    def __init__(self, name: str, limit_kb: int | None) -> None:
        self.name, self.limit_kb, self.cut = name, limit_kb, 0
        self._source, self.descriptor = os.pipe()
        os.set_blocking(self._source, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show, name=f"output of {name}", daemon=True)
        self._reported, self._ends = 0, math.inf
        self._begin_window()

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """Start the worker in the body, which inherits :attr:`descriptor`; its output is shown from then on."""
        try:
            yield
        except BaseException:
            os.close(self._source)
            raise
        else:
            self._thread.start()
        finally:
            os.close(self.descriptor)

    def close(self) -> None:
        """Show what is left in the pipe, and stop; a process that still holds the other end is not waited for."""
        self._ends = time.monotonic() + _END_SECONDS / 2
        self._closing.set()
        self._thread.join(_END_SECONDS)

    def _show(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            closing = self._closing.is_set()  # before the read: what was printed until then is shown
            data = self._read() if poll.poll(0 if closing else _POLL_SECONDS * 1000) else None
            if data:
                self._forward(data)
            if data == b"" or (closing and (data is None or time.monotonic() > self._ends)):
                break
            if time.monotonic() > self._window_ends:
                self._report()
                self._begin_window()
        self._report()
        os.close(self._source)

    def _read(self) -> bytes | None:
        try:
            return os.read(self._source, _CHUNK)
        except BlockingIOError:
            return None

    def _forward(self, data: bytes) -> None:
        shown = data if self._left is None else data[: self._left]
        self.cut += len(data) - len(shown)
        if self._left is not None:
            self._left -= len(shown)
        while shown:
            with contextlib.suppress(InterruptedError):
                try:
                    shown = shown[os.write(2, shown) :]
                except OSError:  # standard error is closed
                    return

    def _begin_window(self) -> None:
        self._left = None if self.limit_kb is None else self.limit_kb * 1024
        self._window_ends = time.monotonic() + WINDOW

    def _report(self) -> None:
        fresh, self._reported = self.cut - self._reported, self.cut
        if fresh:
            logger.warning(
                "%s printed %d bytes over the limit of %s KiB a minute, which are not shown (%d in all); "
                "reward.max_output_kb changes the limit",
                self.name,
                fresh,
                self.limit_kb,
                self.cut,
            )

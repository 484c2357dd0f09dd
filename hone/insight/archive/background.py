"""Writing in a thread, so that the step that made the rows continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger("hone.insight")


class BackgroundWriter:
    """Writer of one file after the other in a thread. An error is raised by the next call.

    >>> writer, written = BackgroundWriter(), []
    >>> writer.submit(lambda: written.append(1))
    >>> writer.wait()
    >>> written
    [1]
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rollout archive")
        self._pending: Future[object] | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Begin to write once the previous file is written.

        Raises:
            HoneError: the previous file could not be written.
        """
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last file is written.

        Raises:
            HoneError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the last file and end the thread; an error that no call has raised is logged."""
        pending, self._pending = self._pending, None
        self._thread.shutdown()
        if pending is not None and (error := pending.exception()) is not None:
            log.error("the rollout archive lacks its last file: %s", error)

"""Seconds that a device computes, without making the host wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class DeviceClock:
    """Adds up the durations of blocks on a device.

    On CUDA the host only queues work, so its own clock would measure the launches. There a block is timed by two events on the
    current stream: from the moment at which the device reaches the block until it has computed all of it. Only :meth:`take` waits.

    Args:
        device: that computes; for all but CUDA the host's clock counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the block."""
        if not self._on_cuda:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def take(self) -> float:
        """Return the seconds since the last call; on CUDA after the device has computed all blocks."""
        events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in events) / 1e3
        self._seconds = 0.0
        return seconds

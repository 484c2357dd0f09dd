"""Streams and events of the simulated GPU.

Operators compute at once, in the order of the host. What streams permit is checked with vector clocks: work that touches memory which
another stream may still be using is an error, and so is memory that is freed while another stream may be using it.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_simulation.operators import caller
from support.simulated_cuda.counters import COUNTERS
from support.simulated_cuda.graphs import copies_under_way, finish_copies, refuse_in_capture
from torch import Tensor

Clock = Counter[int]
"""Number of operators by stream: those that are known to be done."""

HAZARDS: list[str] = []
"""Memory that was freed too early."""


class SimulatedEvent:
    """An event: ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._moment = 0.0
        self.clock: Clock = Counter()

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Note what is under way, and the moment."""
        self._copies, self._moment = copies_under_way(), time.perf_counter()
        self.clock = Counter((stream or current_stream()).clock)

    def elapsed_time(self, later: SimulatedEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return 1e3 * (later._moment - self._moment)

    def synchronize(self) -> None:
        """Wait until everything before :meth:`record` is done."""
        COUNTERS.waits[f"event in {caller()}"] += 1
        refuse_in_capture("a wait for an event")
        _know(self.clock)
        for copy in self._copies:
            if any(copy is other for other in copies_under_way()):
                finish_copies(1)


class SimulatedStream:
    """A stream: ``torch.cuda.Stream``.

    Attributes:
        clock: operators that are done before what the stream is given next.
    """

    _numbers = itertools.count()

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.number = next(self._numbers)
        self.clock: Clock = Counter()
        _ALL.add(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Let later work wait for what ``stream`` has been given."""
        self.clock |= stream.clock

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let later work wait for an event."""
        self.clock |= event.clock

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Record an event after what the stream has been given."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the stream."""
        torch.cuda.synchronize()


_ALL: weakref.WeakSet[SimulatedStream] = weakref.WeakSet()
DEFAULT = SimulatedStream()
_HOST: Clock = Counter()
"""Operators that the host has waited for."""
_THREAD = threading.local()


def current_stream(device: Any = None) -> SimulatedStream:
    """Return the stream of this thread: ``torch.cuda.current_stream``."""
    return getattr(_THREAD, "stream", DEFAULT)


class stream:  # noqa: N801 - its name in torch
    """Give the block's work to a stream: ``torch.cuda.stream``."""

    def __init__(self, chosen: SimulatedStream | None) -> None:
        self._chosen = chosen

    def __enter__(self) -> None:
        self._before = current_stream()
        _THREAD.stream = self._chosen or self._before

    def __exit__(self, *error: object) -> None:
        _THREAD.stream = self._before


def wait_for_all() -> None:
    """Let the host know that all work is done."""
    for given in _ALL:
        _know(given.clock)


def _know(clock: Clock) -> None:
    for number, moment in clock.items():
        _HOST[number] = max(_HOST[number], moment)


@dataclass
class _Use:
    """The work that uses a storage: its last writer, and the last reader of each stream."""

    storage: weakref.ref[Any]
    size: int
    written: tuple[int, int] = (0, 0)
    read: dict[int, int] = field(default_factory=dict)


_USES: dict[int, _Use] = {}
"""By identity of the storage, which torch keeps while the storage lives. Only storages that a second stream has used."""


def note_work(name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """Give an operator to the current stream.

    Args:
        name: of the operator.
        read: memory that it reads.
        written: memory that it changes.

    Raises:
        RuntimeError: another stream may still be using the memory.
    """
    here = current_stream()
    here.clock[here.number] += 1
    now = here.clock[here.number]
    for tensor in written:
        use = _use(tensor, here)
        if use is not None:
            for work in (use.written, *use.read.items()):
                _require(work, here, f"{name} writes")
            use.written, use.read = (here.number, now), {}
    for tensor in read:
        use = _use(tensor, here)
        if use is not None:
            _require(use.written, here, f"{name} reads")
            use.read[here.number] = now


def _use(tensor: Tensor, here: SimulatedStream) -> _Use | None:
    storage = tensor.untyped_storage()
    use = _USES.get(id(storage))
    if use is None and here is not DEFAULT:  # the first stream may have used it until now
        key = id(storage)
        use = _Use(weakref.ref(storage, lambda _: _freed(key)), storage.nbytes(), (DEFAULT.number, DEFAULT.clock[0]))
        _USES[key] = use
    return use


def _require(work: tuple[int, int], here: SimulatedStream, what: str) -> None:
    stream_number, moment = work
    if stream_number != here.number and max(here.clock[stream_number], _HOST[stream_number]) < moment:
        raise RuntimeError(
            f"{what} on stream {here.number} what stream {stream_number} may still be using, in {caller()}"
        )


def _freed(key: int) -> None:
    """Note a hazard unless the first stream, which gets the memory back, knows all its uses to be done."""
    use = _USES.pop(key)
    for number, moment in (use.written, *use.read.items()):
        if number != DEFAULT.number and max(DEFAULT.clock[number], _HOST[number]) < moment:
            HAZARDS.append(f"{use.size} bytes were freed while stream {number} may have been using them")

"""Limit of concurrent requests per replica: as many as its cache serves without a wait."""

from __future__ import annotations

from dataclasses import dataclass

WAITED = 0.5
"""Share of waiting in a request's time above which the engine counts as full. In a burst, new requests wait for each other's
prefill, which takes a smaller share."""
SHRINK, GROW = 0.8, 1.1


@dataclass
class Concurrency:
    """A limit that follows the pressure on an engine's cache, by additive increase and multiplicative decrease.

    An engine without free cache delays new requests or preempts running ones. Both shrink the limit; requests that start at
    once while the limit is reached let it grow. A request that waits in the pool can still go to another replica. The
    windows are numbers of requests (Chiu and Jain 1989).
    """

    start: int = 64
    least: int = 1
    most: int = 4096
    limit: int = 0  # maximum of running requests
    _seen: int = 0
    _waited: float = 0.0
    _lasted: float = 0.0
    _full: bool = False
    _preemptions: int = 0

    def __post_init__(self) -> None:
        self.limit = min(max(self.start, self.least), self.most)

    def note(self, waited: float, lasted: float, under_way: int) -> None:
        """Record a completed request: seconds to its start and to its completion, and the requests in the replica, itself included."""
        self._seen += 1
        self._waited += waited
        self._lasted += lasted
        self._full = self._full or under_way >= self.limit
        if self._seen >= self.limit:
            self._judge()

    def note_preemptions(self, total: int) -> None:
        if total > self._preemptions:
            self._change(SHRINK)
        self._preemptions = total

    def _judge(self) -> None:
        if self._waited > WAITED * self._lasted:
            self._change(SHRINK)
        elif self._full:
            self._change(GROW)
        else:
            self._change(1.0)

    def _change(self, factor: float) -> None:
        changed = int(self.limit * factor) if factor <= 1 else max(self.limit + 1, int(self.limit * factor))
        self.limit = min(max(changed, self.least), self.most)
        self._seen, self._waited, self._lasted, self._full = 0, 0.0, 0.0, False

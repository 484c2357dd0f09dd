"""How many requests a replica is given at once: as many as its cache serves without letting them wait."""

from __future__ import annotations

from dataclasses import dataclass

WAITED = 0.5
"""Share of a request's time that it waits in the engine from which on the engine is full. Less than that is what a burst of new
requests waits for the prefill of each other."""
SHRINK, GROW = 0.8, 1.1


@dataclass
class Concurrency:
    """A limit that follows the pressure on an engine's cache: additive-increase, multiplicative-decrease over windows of
    requests (Chiu and Jain 1989).

    An engine that is out of cache lets requests wait before it begins them, or throws begun ones out (preemption). Either shrinks
    the limit; requests that begin at once while all places are taken let it grow. What waits in the pool instead can still go to
    another replica.

    Attributes:
        limit: requests that may be under way.

    Args:
        start: the first limit.
        least, most: it stays between these.
    """

    start: int = 64
    least: int = 1
    most: int = 4096
    limit: int = 0
    _seen: int = 0
    _waited: float = 0.0
    _lasted: float = 0.0
    _full: bool = False
    _preemptions: int = 0

    def __post_init__(self) -> None:
        self.limit = min(max(self.start, self.least), self.most)

    def note(self, waited: float, lasted: float, under_way: int) -> None:
        """A request is complete.

        Args:
            waited: seconds between sending it and the engine beginning it.
            lasted: seconds between sending it and its completion.
            under_way: requests in the replica at the end, this one included.
        """
        self._seen += 1
        self._waited += waited
        self._lasted += lasted
        self._full = self._full or under_way >= self.limit
        if self._seen >= self.limit:
            self._judge()

    def note_preemptions(self, total: int) -> None:
        """The engine has thrown out so many requests since its start."""
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

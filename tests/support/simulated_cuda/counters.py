"""Counts what programs ask of the simulated GPU."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Work of the simulated GPU since its start. Each counter is by ``operator in function``.

    Attributes:
        launches: kernels; views and allocations launch none.
        waits: times that the host waited until the GPU had computed something.
        to_device: copies of tensors from the host, among them indices on the host and pinned memory.
        to_host: copies of tensors to the host. Those that are not asynchronous are waits too.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_json(cls, text: str) -> Counters:
        """Return the counters that :meth:`to_json` wrote."""
        return cls(**{name: Counter(numbers) for name, numbers in json.loads(text).items()})

    def to_json(self) -> str:
        """Return them as JSON."""
        return json.dumps({name: dict(counter) for name, counter in vars(self).items()})

    def clear(self) -> None:
        """Begin at zero."""
        for counter in vars(self).values():
            counter.clear()


COUNTERS = Counters()
"""Of this process: it has one GPU."""

"""One engine of a pool: its state, its load and its counters."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.generation.pool.concurrency import Concurrency
from hone.generation.protocol import Completion, Engine, EngineDescription, GenerationRequest


class ReplicaState(StrEnum):
    """What a replica may be given."""

    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has, and gets nothing more."""
    FENCED = "fenced"
    """It runs, without the present weights: it waits for them."""
    STARTING = "starting"
    LOST = "lost"
    """Its engine is gone and could not be started again."""


@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        index: its number in the pool.
        engine: None while it is started.
        state: see :class:`ReplicaState`.
        concurrency: how many requests it gets at once.
        under_way: requests it has, by their number in the pool, with their tokens (prompt and the most that may be sampled).
        starts: times its engine was started.
        problem: why its engine is gone; empty while it is there.
        description: what the engine said of itself last.
    """

    index: int
    engine: Engine | None = None
    state: ReplicaState = ReplicaState.STARTING
    concurrency: Concurrency = field(default_factory=Concurrency)
    under_way: dict[int, int] = field(default_factory=dict)
    starts: int = 0
    problem: str = ""
    description: EngineDescription | None = None
    served: int = 0
    tokens: int = 0
    retried: int = 0
    _rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))
    _slowest: list[tuple[float, str]] = field(default_factory=list)
    _waited: float = 0.0

    @property
    def load(self) -> int:
        """Outstanding tokens."""
        return sum(self.under_way.values())

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request."""
        return self.state is ReplicaState.SERVING and len(self.under_way) < self.concurrency.limit

    def takes(self, engine: Engine, description: EngineDescription) -> None:
        """Have an engine, just started."""
        self.engine, self.description = engine, description
        self.starts += 1

    def note(self, request: GenerationRequest, completion: Completion, lasted: float) -> None:
        """A request of its is complete, ``lasted`` seconds after it was sent."""
        waited = max(0.0, lasted - completion.seconds)
        self.concurrency.note(waited, lasted, len(self.under_way))
        self.served += 1
        self.tokens += len(completion.token_ids)
        self._waited += waited
        self._rates.append((time.monotonic(), len(completion.token_ids)))
        self._slowest = sorted([*self._slowest, (lasted, request.request_id)], reverse=True)[:3]

    def report(self) -> dict[str, Any]:
        """What it is and has done.

        ======================  =======================================================================================
        ``tokens_per_second``   over its last 256 requests
        ``queue``               requests it has; ``limit`` how many it gets at most
        ``wait_seconds``        mean time of a request in the engine before it began
        ``slowest``             its three slowest requests, in seconds
        ======================  =======================================================================================
        """
        span = time.monotonic() - self._rates[0][0] if self._rates else 0.0
        return {
            "state": self.state.value,
            "starts": self.starts,
            "served": self.served,
            "retried": self.retried,
            "tokens": self.tokens,
            "tokens_per_second": sum(count for _, count in self._rates) / span if span > 0 else 0.0,
            "queue": len(self.under_way),
            "load": self.load,
            "limit": self.concurrency.limit,
            "wait_seconds": self._waited / self.served if self.served else 0.0,
            "slowest": {name: round(seconds, 3) for seconds, name in self._slowest},
            "problem": self.problem,
        }

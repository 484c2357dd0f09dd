"""One engine of a pool: its state, its load and its counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.generation.pool.concurrency import Concurrency
from hone.generation.protocol import Completion, Engine, EngineDescription

COUNTERS = (
    *("prefill_tokens", "cached_tokens", "preemptions"),
    *("drafted_tokens", "accepted_tokens"),
    *("weights_sent_bytes", "weights_compared", "weights_changed", "weights_refused"),
)
"""Counters of engines that a pool reports, as far as an engine has them."""


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


@dataclass
class Window:
    """What a replica has done since it was last asked.

    Attributes:
        served: requests that it completed.
        tokens: sampled by them.
        retried: requests that were taken from it, because it was lost or too slow.
        queued: seconds that the completed ones waited, in the pool and in the engine, before the engine began them.
        first_token: seconds until their first token, waiting included; None where the engine does not say.
        slowest: seconds of the slowest of them, waiting included.
        busy: seconds during which it had requests.
    """

    served: int = 0
    tokens: int = 0
    retried: int = 0
    queued: float = 0.0
    first_token: float | None = 0.0
    slowest: float = 0.0
    busy: float = 0.0


@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        index: its number in the pool.
        concurrency: how many requests it gets at once.
        engine: None while it is started.
        state: see :class:`ReplicaState`.
        under_way: requests it has, by their number in the pool, with their tokens (prompt and the most that may be sampled).
        starts: times its engine was started.
        problem: why its engine is gone; empty while it is there.
        description: what the engine said of itself last.
        window: see :class:`Window`.
    """

    index: int
    concurrency: Concurrency = field(default_factory=Concurrency)
    engine: Engine | None = None
    state: ReplicaState = ReplicaState.STARTING
    under_way: dict[int, int] = field(default_factory=dict)
    starts: int = 0
    problem: str = ""
    description: EngineDescription | None = None
    window: Window = field(default_factory=Window)
    _since: float = 0.0
    _reported: dict[str, int] = field(default_factory=dict)

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
        self.engine, self.description, self._reported = engine, description, {}
        self.starts += 1

    def begin(self, number: int, tokens: int) -> None:
        """Have a request, of so many tokens."""
        if not self.under_way:
            self._since = time.monotonic()
        self.under_way[number] = tokens

    def end(self, number: int) -> None:
        """Have it no more."""
        if self.under_way.pop(number, None) is not None and not self.under_way:
            self.window.busy += time.monotonic() - self._since

    def note(self, completion: Completion, queued: float, lasted: float) -> None:
        """A request is complete.

        Args:
            completion: of it.
            queued: seconds that it waited in the pool.
            lasted: seconds from then on.
        """
        waited, window = max(0.0, lasted - completion.seconds), self.window
        self.concurrency.note(waited, lasted, len(self.under_way))
        window.served += 1
        window.tokens += len(completion.token_ids)
        window.queued += queued + waited
        window.slowest = max(window.slowest, queued + lasted)
        if completion.first_token_seconds is None:
            window.first_token = None
        elif window.first_token is not None:
            window.first_token += queued + waited + completion.first_token_seconds

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the time since the last call, by the last part of their names in the table of metrics."""
        window, self.window = self.window, Window()
        if self.under_way:
            now = time.monotonic()
            window.busy, self._since = window.busy + now - self._since, now
        metrics: dict[str, float] = {
            "num_requests": window.served,
            "num_retried": window.retried,
            "num_restarts": max(0, self.starts - 1),
            "max_concurrency": self.concurrency.limit,
        }
        if window.busy > 0:
            metrics["throughput"] = window.tokens / window.busy
        if window.served:
            metrics["queue_time"] = window.queued / window.served
            metrics["slowest_request"] = window.slowest
            if window.first_token is not None:
                metrics["time_to_first_token"] = window.first_token / window.served
        return metrics | self._counted()

    def _counted(self) -> dict[str, float]:
        """What the engine itself has counted since the last call, or since it was started."""
        stats = self.description.stats if self.description is not None else {}
        now = {name: int(stats[name]) for name in COUNTERS if name in stats}
        new = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        self._reported = now
        metrics: dict[str, float] = {}
        if "preemptions" in new:
            metrics["num_preemptions"] = new["preemptions"]
        prompts = new.get("prefill_tokens", 0) + new.get("cached_tokens", 0)
        if "cached_tokens" in new and prompts:
            metrics["cache_hit_rate"] = new["cached_tokens"] / prompts
        if new.get("drafted_tokens"):
            metrics["draft_acceptance"] = new["accepted_tokens"] / new["drafted_tokens"]
        if "weights_sent_bytes" in new:
            metrics["weights_sent_mb"] = new["weights_sent_bytes"] / 2**20
        if compared := new.get("weights_compared"):
            metrics["weights_changed"] = new["weights_changed"] / compared
            metrics["weights_refused"] = new["weights_refused"]
        return metrics

    def report(self) -> dict[str, Any]:
        """What it is now: state, starts of its engine, requests and tokens under way, most requests at once, why it is gone."""
        return {
            "state": self.state.value,
            "starts": self.starts,
            "requests": len(self.under_way),
            "load": self.load,
            "limit": self.concurrency.limit,
            "problem": self.problem,
        }

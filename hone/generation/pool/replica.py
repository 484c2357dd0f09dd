"""One engine of a pool: its state, its load and its counters."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.generation.protocol import Completion, Engine, EngineDescription

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


COUNTERS = (
    "prefill_tokens", "cached_tokens", "preemptions",
    "drafted_tokens", "accepted_tokens",
    "weights_sent_bytes", "weights_on_gpu_bytes", "weights_compared", "weights_changed", "weights_refused",
)  # fmt: skip
"""Engine counters that a pool reports if an engine has them."""


class ReplicaState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    """It finishes its requests and gets no more."""
    FENCED = "fenced"
    """It runs, but waits for the latest weights."""
    STARTING = "starting"
    LOST = "lost"
    """Its engine ended and could not be restarted."""
    CLOSING = "closing"
    """It has finished its requests, and its engine ends, because the pool gets smaller."""


@dataclass
class Window:
    """Counters of a replica since the last report."""

    served: int = 0  # completed requests
    tokens: int = 0  # sampled tokens of the completed requests
    retried: int = 0  # requests that went to another replica, because this one was lost or too slow
    queued: float = 0.0  # seconds that completed requests waited in the pool and the engine before their start
    # seconds until their first token, waiting included; None if the engine does not report it
    first_token: float | None = 0.0
    slowest: float = 0.0  # seconds of the slowest request, waiting included
    busy: float = 0.0  # seconds with at least one request


@dataclass(eq=False)
class Replica:
    index: int  # number in the pool
    concurrency: Concurrency = field(default_factory=Concurrency)  # limit of its requests
    engine: Engine | None = None  # None while it starts
    state: ReplicaState = ReplicaState.STARTING  # see :class:`ReplicaState`
    leaving: bool = False  # whether it gets no more requests, because the pool gets smaller
    # number of each request in the pool to its tokens (prompt and maximum of the response)
    under_way: dict[int, int] = field(default_factory=dict)
    starts: int = 0  # number of engine starts
    problem: str = ""  # why its engine ended; empty while it runs
    description: EngineDescription | None = None  # latest description of the engine
    window: Window = field(default_factory=Window)  # see :class:`Window`
    # for blocking calls of its engine
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "hone-replica"))
    _since: float = 0.0
    _reported: dict[str, int] = field(default_factory=dict)

    @property
    def load(self) -> int:
        """Outstanding tokens."""
        return sum(self.under_way.values())

    @property
    def serves(self) -> bool:
        return self.state is ReplicaState.SERVING and not self.leaving

    @property
    def is_available(self) -> bool:
        """True if the replica can take one more request."""
        return self.serves and len(self.under_way) < self.concurrency.limit

    def attach(self, engine: Engine, description: EngineDescription) -> None:
        """Use an engine that was just started."""
        self.engine, self.description, self._reported = engine, description, {}
        self.starts += 1

    def begin(self, number: int, tokens: int) -> None:
        """Add a request with this number of tokens."""
        if not self.under_way:
            self._since = time.monotonic()
        self.under_way[number] = tokens

    def end(self, number: int) -> None:
        """Remove a request."""
        if self.under_way.pop(number, None) is not None and not self.under_way:
            self.window.busy += time.monotonic() - self._since

    def note(self, completion: Completion, queued: float, lasted: float) -> None:
        """Record a completed request: it waited ``queued`` seconds in the pool, and ``lasted`` seconds from then on."""
        waited, window = max(0.0, lasted - completion.seconds), self.window
        # by the engine's clock: a busy caller is not a full cache
        full = completion.queued_seconds
        self.concurrency.note(full, full + completion.seconds, len(self.under_way))
        window.served += 1
        window.tokens += len(completion.token_ids)
        window.queued += queued + waited
        window.slowest = max(window.slowest, queued + lasted)
        if completion.first_token_seconds is None:
            window.first_token = None
        elif window.first_token is not None:
            window.first_token += queued + waited + completion.first_token_seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by the last part of their names in the metric table."""
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
        return metrics | self._engine_metrics()

    def _engine_metrics(self) -> dict[str, float]:
        """Return the increase of the engine's counters since the last call, or since its start."""
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
            if self.description is not None and self.description.device.startswith("cuda"):
                metrics["weights_on_gpu_mb"] = new["weights_on_gpu_bytes"] / 2**20
        if compared := new.get("weights_compared"):
            metrics["weights_changed"] = new["weights_changed"] / compared
            metrics["weights_refused"] = new["weights_refused"]
        return metrics

    def report(self) -> dict[str, Any]:
        """Return state, engine starts, running requests and tokens, request limit and problem."""
        return {
            "state": (
                ReplicaState.DRAINING if self.leaving and self.state is ReplicaState.SERVING else self.state
            ).value,
            "starts": self.starts,
            "requests": len(self.under_way),
            "load": self.load,
            "limit": self.concurrency.limit,
            "problem": self.problem,
        }

"""Access to the engine from the endpoint's thread, with a limit on concurrent requests."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hone.agents.episode import EngineClient
from hone.agents.serving.errors import ApiError, bad_request
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError, RequestError
from hone.generation.protocol import Alternatives, Completion, GenerationRequest, Progress

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
                       160, 640, 2560)  # fmt: skip
LATENCY_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
                   7680)  # fmt: skip
CONTENT_TYPE = CONTENT_TYPE_LATEST
PATHS = frozenset(
    {
        "/health",
        "/version",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)
_BELOW = re.compile(r"(/sessions/)[^/]+(?:(/v1)(?=/)|$)")
_NAMED = re.compile(r"(/v1/models|/v1/responses|/replicas)(?:/|$).*")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Metrics:
    """Counters and histograms of one endpoint, with the state of the engine that it uses now."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineState(lambda: 0, dict)
        self._registry.register(self._engine)
        self._answers = Counter(
            "hone_http_requests", "Answered requests.", ["endpoint", "status"], registry=self._registry
        )
        self._prompt = Counter("hone_prompt_tokens", "Prompt tokens of completed replies.", registry=self._registry)
        self._sampled = Counter("hone_generation_tokens", "Sampled tokens.", registry=self._registry)
        self._replies = Counter(
            "hone_request_success", "Completed replies.", ["finished_reason"], registry=self._registry
        )
        self._first_token = Histogram(
            "hone_time_to_first_token_seconds",
            "Seconds from a request to its first token, where the engine reports it.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._latency = Histogram(
            "hone_e2e_request_latency_seconds",
            "Seconds from a request to its last token.",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    def follow(self, load: Callable[[], int], engine_stats: Callable[[], Mapping[str, Any]]) -> None:
        """Report the requests in this engine and its counters from now on; these may start again at 0."""
        self._engine.load, self._engine.engine_stats = load, engine_stats

    def count_answer(self, path: str, status: int) -> None:
        self._answers.labels(endpoint_of(path), str(status)).inc()

    def count_reply(self, request: GenerationRequest, completion: Completion, started: float) -> None:
        """Count a completed reply to a request that reached the gateway at ``started`` (``time.perf_counter``)."""
        seconds = time.perf_counter() - started
        self._prompt.inc(len(request.prompt_ids))
        self._sampled.inc(len(completion.token_ids))
        self._replies.labels(completion.stop_reason.value).inc()
        self._latency.observe(seconds)
        if completion.first_token_seconds is not None:
            waited = max(0.0, seconds - completion.seconds)
            self._first_token.observe(waited + completion.first_token_seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineState(Collector):
    """Load and cache of the engine, read when metrics are requested."""

    def __init__(self, load: Callable[[], int], engine_stats: Callable[[], Mapping[str, Any]]) -> None:
        self.load, self.engine_stats = load, engine_stats

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that the engine reports; engines without a counter have no such metric."""
        stats = self.engine_stats()
        waiting = int(stats.get("waiting", 0))
        yield GaugeMetricFamily("hone_num_requests_waiting", "Requests that wait in the engine.", waiting)
        running = max(0, self.load() - waiting)
        yield GaugeMetricFamily("hone_num_requests_running", "Requests that the engine decodes.", running)
        if stats.get("max_cache_tokens"):
            share = stats["cache_tokens"] / stats["max_cache_tokens"]
            yield GaugeMetricFamily(
                "hone_kv_cache_usage_perc", "Share of the KV cache that is allocated; 1 is all.", share
            )
        if "cached_tokens" in stats and "prefill_tokens" in stats:
            cached = stats["cached_tokens"]
            queries = cached + stats["prefill_tokens"]
            yield CounterMetricFamily("hone_prefix_cache_queries", "Prompt tokens that reached the engine.", queries)
            yield CounterMetricFamily("hone_prefix_cache_hits", "Prompt tokens read from the cache.", cached)
        if "preemptions" in stats:
            yield CounterMetricFamily("hone_num_preemptions", "Preempted requests.", stats["preemptions"])


class CountedApp:
    """ASGI application that counts the answers of another one."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request and count it by its status, once the status is sent."""
        path = str(scope.get("path", ""))

        async def counted(message: Scope) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_answer(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def endpoint_of(path: str) -> str:
    """Return the label of a path: the route without names, so that clients cannot add labels.

    >>> endpoint_of("/sessions/a/v1/chat/completions"), endpoint_of("/sessions/a"), endpoint_of("/v1/models/b")
    ('/sessions/<id>/v1/chat/completions', '/sessions/<id>', '/v1/models')
    >>> endpoint_of("/etc/passwd")
    'other'
    """
    prefix = ""
    if (below := _BELOW.match(path)) is not None:
        prefix, path = "/sessions/<id>", path[below.end() - len(below[2] or "") :]
        if not path:
            return prefix
    path = _NAMED.sub(r"\1", path)
    return prefix + path if path in PATHS or path in ("/replicas", "/release") else "other"


T = TypeVar("T")
log = logging.getLogger("hone.serve")


class Gateway:
    """Gateway from the endpoint's thread to the event loop on which the engine runs.

    Decoding blocks a loop for several steps at a time; in a separate thread the endpoint stays responsive.
    """

    def __init__(
        self,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,  # the engine's event loop
        *,
        most_waiting: int = 16384,  # maximum number of concurrent requests; further ones get status 503, to be retried
        # counters of the gateway before, which this one continues; None starts new ones
        metrics: Metrics | None = None,
    ) -> None:
        self.client, self.loop, self.most_waiting = client, loop, most_waiting
        self.under_way = 0  # number of running requests
        self.metrics = metrics or Metrics()  # counters of requests and replies
        self.metrics.follow(lambda: self.under_way, lambda: client.engine.describe().stats)

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return a request's completion, awaited on the endpoint's loop. Cancelling the caller aborts the request."""
        if self.under_way >= self.most_waiting:
            raise ApiError(
                503,
                f"{self.under_way} requests are running, the maximum of this server; try again later",
                code="overloaded",
            )
        if request.progress is not None:
            request = dataclasses.replace(request, progress=self._from_engine(request.progress))
        self.under_way += 1
        started = time.perf_counter()
        try:
            completion = await self.on_engine(self.client.complete(request))
        except RequestError as error:
            raise bad_request(f"{error.what}; {error.why}", error.field or None) from error
        except GenerationError as error:
            log.error("a request failed in the engine", exc_info=error)
            raise ApiError(500, f"the engine failed: {error.what}", code="engine_failed") from error
        except ProcessError as error:
            raise ApiError(503, error.what, code="engine_lost") from error
        finally:
            self.under_way -= 1
        if completion.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
            raise ApiError(503, "the engine aborted the reply before its end; try again", code="aborted")
        self.metrics.count_reply(request, completion, started)
        return completion

    async def end_session(self, name: str) -> None:
        await self.on_engine(self.client.end_sessions([name]))

    async def on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _from_engine(self, progress: Progress) -> Progress:
        """Return ``progress`` wrapped such that it always runs on the endpoint's loop."""
        endpoint_loop = asyncio.get_running_loop()

        def forward(ids: list[int], log_probs: list[float], alternatives: list[Alternatives]) -> None:
            endpoint_loop.call_soon_threadsafe(progress, ids, log_probs, alternatives)

        return forward

"""The interface of engines to their server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.generation.protocol import Completion, GenerationRequest


@dataclass(frozen=True)
class BackendSettings:
    """Settings of an engine; see :class:`hone.generation.remote.process.LaunchPlan`."""

    engine: str
    model: str
    tokenizer: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    max_cache_tokens: int | None
    options: dict[str, Any] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    lora: dict[str, float] | None = None
    sleeps: bool = False


class Backend(Protocol):
    """An engine behind a server. Request ids are unique; all methods run in one event loop."""

    max_cache_tokens: int | None  # capacity of the KV cache; None if unknown
    device: str  # type of the devices that compute
    gpus: list[str]  # UUIDs of the GPUs onto which its processes load weights; empty on a CPU, or if unknown
    reads_images: bool  # whether engine and model read images

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request; many run at once. The server sets ``weight_versions``; ``token_versions`` are the backend's, if it knows them."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens sampled so far."""
        ...

    async def pause(self) -> None:
        """Stop decoding; requests keep their state, and new ones wait."""
        ...

    async def resume(self) -> None:
        """Resume decoding."""
        ...

    async def begin_weights(self, version: int) -> None:
        """Prepare for the weights of a version; those of an incomplete one do not count."""
        ...

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        """Load a chunk (:func:`hone.generation.remote.transports.open_chunk`), whose memory is reused afterwards."""
        ...

    async def finish_weights(self) -> None:
        """Complete a weight sync: update what is derived from weights, and drop the cache of the old ones.

        Requests that are paused meanwhile keep their cache (native), or have it computed again.

        Raises:
            GenerationError: some weights have not arrived.
        """
        ...

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free memory until :meth:`wake`: the cache, and on a GPU the weights, with ``keep_weights`` into host memory. No request runs."""
        ...

    async def wake(self, *, cache: bool) -> None:
        """Take the memory of the weights back, and with ``cache`` that of the cache too. An engine that is awake stays so."""

    def stats(self) -> dict[str, Any]:
        """Return the counters since start."""
        ...

    def close(self) -> None:
        """End the processes that the engine started."""


class PackagedBackend(Backend):
    """An engine of another package."""

    reads_images = False
    _engine: Any
    _stats: dict[str, Any]

    def _count(self, request: GenerationRequest, tokens: Sequence[int], cached: int = 0) -> None:
        """Count a request with its response and the tokens of its prompt that were in the cache."""
        self._stats["requests"] += 1
        self._stats["prefill_tokens"] += len(request.prompt_ids) - cached
        self._stats["decode_tokens"] += len(tokens)
        if "cached_tokens" in self._stats:
            self._stats["cached_tokens"] += cached

    def stats(self) -> dict[str, Any]:
        return dict(self._stats)

    def close(self) -> None:
        self._engine.shutdown()

"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.generation.protocol import Completion, GenerationRequest


@dataclass(frozen=True)
class Settings:
    """What an engine is started with; see :class:`hone.generation.remote.process.LaunchPlan`."""

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


class Backend(Protocol):
    """An engine, as its server sees it. Requests have names of their own; all methods run in one event loop."""

    max_cache_tokens: int | None
    device: str

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request; many run at once. ``weight_versions`` are filled in by the server."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens they have."""
        ...

    async def pause(self) -> None:
        """Stop decoding; requests stay, and new ones wait."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def begin_weights(self) -> None:
        """New weights follow."""
        ...

    async def load_weights(self, parcel: dict[str, Any]) -> None:
        """Take a parcel (:func:`hone.generation.remote.transports.opened`); what it holds is gone afterwards."""
        ...

    async def finish_weights(self) -> None:
        """All have arrived: make what is derived from them anew, and forget what was cached of the old ones.

        Raises:
            GenerationError: some have not arrived.
        """
        ...

    async def sleep(self) -> None:
        """Let go of what is cached."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


async def open_backend(settings: Settings) -> Backend:
    """Start the engine that the settings name."""
    match settings.engine:
        case "vllm" if settings.lora:
            from hone.generation.server.vllm_adapters import VllmAdapterBackend

            return VllmAdapterBackend(settings)
        case "vllm":
            from hone.generation.server.vllm_backend import VllmBackend

            return VllmBackend(settings)
        case "sglang":
            from hone.generation.server.sglang_backend import SglangBackend

            return SglangBackend(settings)
        case "trtllm":
            from hone.generation.server.trtllm_backend import TrtllmBackend

            return await TrtllmBackend.opened(settings)
        case "native":
            from hone.generation.server.native_backend import NativeBackend

            return NativeBackend(settings)
    raise ValueError(f"no server for engine '{settings.engine}'")

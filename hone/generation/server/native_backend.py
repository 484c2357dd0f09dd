"""The native engine in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.errors import ConfigError
from hone.generation.attention import use_hone_attention
from hone.generation.native.engine import NativeEngine
from hone.generation.protocol import Completion, GenerationRequest
from hone.generation.remote.transports import Mappings, opened
from hone.generation.server.backend import Settings
from hone.threads import compute_here


class NativeBackend:
    """A model of its own, loaded from a directory, behind :class:`~hone.generation.native.engine.NativeEngine`."""

    def __init__(self, settings: Settings) -> None:
        if settings.options:
            raise ConfigError(f"the native engine takes no further arguments, given are {', '.join(settings.options)}")
        compute_here(len(settings.cpus) or None)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        model.requires_grad_(False).eval().to(device)
        use_hone_attention(model)
        self._mappings, self._update = Mappings(), 0
        self.device, self.max_cache_tokens = str(device), settings.max_cache_tokens
        self._engine = NativeEngine(
            model,
            AutoTokenizer.from_pretrained(settings.tokenizer),
            device=device,
            dtype=settings.dtype,
            max_num_seqs=settings.max_num_seqs,
            max_cache_tokens=settings.max_cache_tokens,
            max_model_len=settings.max_model_len,
            shares_weights=False,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request."""
        return [completion async for completion in self._engine.generate([request])][0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with the tokens they have."""
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        """Stop decoding."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()

    async def begin_weights(self) -> None:
        """A new version follows; what has come of one that broke off does not count."""
        self._update += 1

    async def load_weights(self, parcel: dict[str, Any]) -> None:
        """Copy the parcel's tensors into the model."""
        with opened(parcel, self._mappings) as tensors:
            await self._engine.load_weights(tensors, self._update, last=False)

    async def finish_weights(self) -> None:
        """Check that all have arrived."""
        await self._engine.load_weights([], self._update)

    async def sleep(self) -> None:
        """Give the cache's memory back."""
        await self._engine.sleep()

    def stats(self) -> dict[str, Any]:
        """Counters since start."""
        return self._engine.describe().stats

    def close(self) -> None:
        """There is no other process."""

"""The native engine as the backend of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from hone.config.model import ModelConfig
from hone.config.rollout import SpeculativeConfig
from hone.generation.native.engine import NativeEngine
from hone.generation.native.speculative.build import speculation_from_config
from hone.generation.protocol import Completion, GenerationRequest
from hone.generation.remote.gpus import uuid_of
from hone.generation.remote.transports import Mappings, open_chunk
from hone.generation.server.arguments import check_names
from hone.generation.server.backend import Backend, BackendSettings
from hone.models.images import find_processor
from hone.models.loading import load_policy
from hone.models.tied import untie
from hone.threads import compute_here

_ARGUMENTS = ("gpu_memory_utilization", "report_experts", "speculative", "untied_head")
"""Arguments of the engine besides those of all engines."""


class NativeBackend(Backend):
    """Runs :class:`~hone.generation.native.engine.NativeEngine` with a model loaded from a directory."""

    def __init__(self, settings: BackendSettings) -> None:
        check_names("native", settings.options, _ARGUMENTS, title="The native engine")
        compute_here(len(settings.cpus) or None)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = ModelConfig(path=settings.model, tokenizer_path=settings.tokenizer)
        model: Any = load_policy(config, device=device, seed=0, trainable=False)
        self.reads_images = find_processor(model) is not None
        self._mappings, self._version = Mappings(), 0
        self.device, self.max_cache_tokens = str(device), settings.max_cache_tokens
        self.gpus = [uuid_of(device)] if device.type == "cuda" else []
        options = dict(settings.options)
        if options.pop("untied_head", False):
            untie(model)
        drafts = SpeculativeConfig(**options.pop("speculative", {}))
        speculation = speculation_from_config(drafts, device=device, dtype=settings.dtype)
        self._engine = NativeEngine(
            model,
            AutoTokenizer.from_pretrained(settings.tokenizer),
            device=device,
            dtype=settings.dtype,
            max_num_seqs=settings.max_num_seqs,
            max_cache_tokens=settings.max_cache_tokens,
            max_model_len=settings.max_model_len,
            shares_weights=False,
            speculation=speculation,
            **options,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        return [completion async for completion in self._engine.generate([request])][0]

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def begin_weights(self, version: int) -> None:
        """Start a new version; weights of an incomplete one do not count."""
        self._engine.forget_incomplete()
        self._version = version

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        with open_chunk(chunk, self._mappings) as tensors:
            await self._engine.load_weights(tensors, self._version, last=False)

    async def finish_weights(self) -> None:
        await self._engine.load_weights([], self._version)

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the cache, and drop the weights or leave them in their place."""
        await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self, *, cache: bool) -> None:
        await self._engine.wake(cache=cache)

    def stats(self) -> dict[str, Any]:
        return self._engine.describe().stats

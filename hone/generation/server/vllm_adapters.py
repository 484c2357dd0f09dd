"""vLLM with a LoRA adapter, for weight syncs that send only the adapter."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, get_args

from hone.errors import GenerationError
from hone.generation.remote.transports import open_chunk
from hone.generation.server.adapters import AdapterFolder
from hone.generation.server.backend import BackendSettings
from hone.generation.server.vllm_backend import VllmBackend


class VllmAdapterBackend(VllmBackend):
    """A :class:`~hone.generation.server.vllm_backend.VllmBackend` whose base weights stay those of the model directory.

    There is one adapter, and every version replaces the previous one: running requests continue with the new one.
    """

    def __init__(self, settings: BackendSettings) -> None:
        assert settings.lora is not None
        self._adapter = AdapterFolder(settings.lora)
        super().__init__(settings)
        self.gpus = []  # this process reads adapters, in memory of the host

    def _options(self, settings: BackendSettings) -> dict[str, Any]:
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank((settings.lora or {})["r"])}
        return {**adapters, **super()._options(settings)}

    async def begin_weights(self, version: int) -> None:
        """Prepare for a new version."""
        await self._prepare()
        self._adapter.begin()

    async def load_weights(self, chunk: dict[str, Any]) -> None:
        """Load a chunk."""
        with open_chunk(chunk) as tensors:
            self._adapter.take(tensors)

    async def finish_weights(self) -> None:
        """Replace the previous version, and drop its cache."""
        from vllm.lora.request import LoRARequest

        self._adapter.finish()
        if not await self._engine.add_lora(LoRARequest("policy", 1, self._adapter.path, load_inplace=True)):
            raise GenerationError("vLLM did not load the adapter")
        self._lora = LoRARequest("policy", 1, self._adapter.path)
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """End vLLM's processes."""
        super().close()
        self._adapter.remove()


def _rank(rank: float) -> int:
    """Return the smallest rank of vLLM's buffers that fits."""
    from vllm.config.lora import MaxLoRARanks

    return next((size for size in get_args(MaxLoRARanks) if size >= rank), int(rank))

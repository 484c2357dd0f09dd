"""vLLM that computes with a LoRA adapter, and takes new versions of the adapter alone."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, get_args

from hone.errors import GenerationError
from hone.generation.remote.transports import opened
from hone.generation.server.adapters import AdapterFolder
from hone.generation.server.backend import Settings
from hone.generation.server.vllm_backend import VllmBackend


class VllmAdapterBackend(VllmBackend):
    """As :class:`~hone.generation.server.vllm_backend.VllmBackend`; the model's own weights stay those of its directory.

    There is one adapter, and every version takes the place of the one before: a request under way goes on with the new one.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.lora is not None
        self._adapter = AdapterFolder(settings.lora)
        super().__init__(settings)

    def _options(self, settings: Settings) -> dict[str, Any]:
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank((settings.lora or {})["r"])}
        return {**adapters, **super()._options(settings)}

    async def begin_weights(self) -> None:
        """A new version follows."""
        await self._prepare()
        self._adapter.begin()

    async def load_weights(self, parcel: dict[str, Any]) -> None:
        """Take a parcel."""
        with opened(parcel) as tensors:
            self._adapter.take(tensors)

    async def finish_weights(self) -> None:
        """Put the version into the place of the one before, and forget what was computed with that."""
        from vllm.lora.request import LoRARequest

        self._adapter.finish()
        if not await self._engine.add_lora(LoRARequest("policy", 1, self._adapter.path, load_inplace=True)):
            raise GenerationError("vLLM did not take the adapter")
        self._lora = LoRARequest("policy", 1, self._adapter.path)
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """End vLLM's processes."""
        super().close()
        self._adapter.remove()


def _rank(rank: float) -> int:
    """The smallest of the ranks that vLLM has buffers for."""
    from vllm.config.lora import MaxLoRARanks

    return next((size for size in get_args(MaxLoRARanks) if size >= rank), int(rank))

"""vLLM with a LoRA adapter, for weight syncs that send only the adapter."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file
from torch import Tensor

from hone.errors import GenerationError
from hone.generation.protocol import require_weights
from hone.generation.remote.transports import open_chunk
from hone.generation.server.backend import BackendSettings
from hone.generation.server.vllm_backend import VllmBackend

_ADAPTER_NAME = ".default."
"""Adapter name in PEFT's parameter names, which its files do not have."""
_LORA_WEIGHT = re.compile(r"\.lora_[AB]\.weight$")


class AdapterFolder:
    """A LoRA adapter in PEFT's layout, in a temporary directory; ``shape`` has ``r`` and ``lora_alpha``."""

    def __init__(self, shape: Mapping[str, float]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-adapter-")
        self.path, self._shape = self._directory.name, shape
        self._arrived: dict[str, Tensor] = {}
        self._names: set[str] = set()

    def begin(self) -> None:
        self._arrived = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Store copies of some weights."""
        self._arrived |= {name.replace(_ADAPTER_NAME, "."): tensor.clone() for name, tensor in tensors}

    def finish(self) -> None:
        """Write the version to the directory.

        Raises:
            GenerationError: a weight is missing, or does not belong to a LoRA adapter.
        """
        arrived = set(self._arrived)
        foreign = sorted(name for name in arrived if not _LORA_WEIGHT.search(name)) or (
            ["nothing"] if not arrived else []
        )
        if foreign:
            raise GenerationError(
                f"'{foreign[0]}' is not a weight of a LoRA adapter, and this engine takes only those",
                fix="actor_rollout_ref.rollout.merge_lora=true for an engine that takes whole weights",
            )
        modules = {name.split(".lora_")[0] for name in arrived}
        expected = self._names | {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
        require_weights(expected, expected - arrived, "adapter")
        self._names = arrived
        modules_by_suffix = sorted({module.rsplit(".", 1)[-1] for module in modules})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": modules_by_suffix}
        save_file(self._arrived, Path(self.path, "adapter_model.safetensors"))
        Path(self.path, "adapter_config.json").write_text(json.dumps({**config, **self._shape}))
        self._arrived = {}

    def remove(self) -> None:
        self._directory.cleanup()


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
        await self._prepare()
        self._adapter.begin()

    async def load_weights(self, chunk: dict[str, Any]) -> None:
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
        super().close()
        self._adapter.remove()


def _rank(rank: float) -> int:
    """Return the smallest rank of vLLM's buffers that fits."""
    from vllm.config.lora import MaxLoRARanks

    return next((size for size in get_args(MaxLoRARanks) if size >= rank), int(rank))

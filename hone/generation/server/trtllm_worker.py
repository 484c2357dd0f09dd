"""Hone's extension of TensorRT-LLM's worker processes, which loads weights.

TensorRT-LLM combines it with its worker class (``ray_worker_extension_cls``); every worker of a sharded model runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from typing import Any

from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from hone.generation.remote.transports import Mappings, open_chunk


class HoneWorker(WorkerExtension):
    """Methods that the server calls by name on every worker (``hone_...``); ``device_id`` is an attribute of the worker.

    TensorRT-LLM's ``update_weights`` takes for each device pairs of a function and its arguments, which return a tensor. None
    ends an update. Training processes on the same GPU call it with CUDA IPC handles.
    """

    device_id: int
    _hone_mappings = Mappings()

    def hone_alive(self) -> None:
        """Do nothing; the call fails for a lost worker."""

    def hone_begin_weights(self) -> None:
        """Drop an incomplete update."""
        abort = getattr(self, "abort_update_weights", None)  # versions without it drop it by themselves
        if abort is not None:
            abort()

    def hone_load_weights(self, chunk: str) -> list[str]:
        """Load a chunk, given as JSON, and return the names of its weights."""
        with open_chunk(json.loads(chunk), self._hone_mappings) as tensors:
            handles = [(name, (_on_device, (tensor, *[None] * 6))) for name, tensor in tensors]
            if handles:
                self.update_weights({get_device_uuid(self.device_id): handles})
        return [name for name, _ in handles]

    def hone_finish_weights(self) -> None:
        """Update what is derived from weights, and drop the cache of the old ones."""
        self.update_weights(None)


def _on_device(tensor: Tensor, *rest: Any) -> Tensor:
    """Copy the tensor, whose memory is reused, to the device whose index TensorRT-LLM puts at position 6 of the arguments."""
    return tensor.to(rest[5], copy=True)

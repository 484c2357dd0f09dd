"""What runs inside TensorRT-LLM's own worker processes: takes weights.

TensorRT-LLM makes a class of its worker and of this (``ray_worker_extension_cls``); every worker of a divided model runs each method.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from typing import Any

from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from hone.generation.remote.transports import opened


class HoneWorker(WorkerExtension):
    """Methods that the server calls by name on every worker (``hone_...``); ``device_id`` is the worker's.

    TensorRT-LLM's own ``update_weights`` takes what each device needs as pairs of a function and its arguments, which make a
    tensor, and ends an update when it gets none. That is what training processes on the same GPU call with handles of CUDA IPC.
    """

    device_id: int

    def hone_alive(self) -> None:
        """Say nothing; a worker that is lost does not even that."""

    def hone_begin_weights(self) -> None:
        """Forget what has come of an update that did not end."""
        abort = getattr(self, "abort_update_weights", None)  # versions without it forget by themselves
        if abort is not None:
            abort()

    def hone_load_weights(self, parcel: str) -> list[str]:
        """Take a parcel, in JSON; returns the names in it."""
        with opened(json.loads(parcel)) as tensors:
            handles = [(name, (_on_device, (tensor, *[None] * 6))) for name, tensor in tensors]
            self.update_weights({get_device_uuid(self.device_id): handles})
        return [name for name, _ in handles]

    def hone_finish_weights(self) -> None:
        """Make what is derived of the weights anew, and forget what was cached of the old ones."""
        self.update_weights(None)


def _on_device(tensor: Tensor, *rest: Any) -> Tensor:
    """The tensor on the device whose number TensorRT-LLM puts at place 6 of the arguments."""
    return tensor.to(rest[5])

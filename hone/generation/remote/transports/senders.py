"""The trainer's side of transports, by name."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.errors import ConfigError
from hone.generation.remote.transports.layout import CHUNKS_IN_FLIGHT, Named, layout, view
from hone.generation.remote.transports.shared_memory import SharedMemorySender


class FileSender:
    """Safetensors files in a directory that both processes can read; None creates a temporary one."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

    def bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        from safetensors.torch import save_file

        self._count += 1
        path = Path(self._directory.name, f"{self._count}.safetensors")
        save_file(_without_shared_storage(tensors), path)
        self._paths.append(path)
        if len(self._paths) > CHUNKS_IN_FLIGHT:
            self._paths.pop(0).unlink()
        return {"transport": "file", "path": str(path), "names": [name for name, _ in tensors]}

    def close(self) -> None:
        self._directory.cleanup()


def _without_shared_storage(tensors: Sequence[Named]) -> dict[str, Tensor]:
    """Copy tensors that share storage with another one, which safetensors would refuse."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        memory = whole.untyped_storage().data_ptr()
        separate[name] = whole.clone() if memory in storages else whole
        storages.add(memory)
    return separate


class SocketSender:
    def bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        places, size = layout(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), place in zip(tensors, places, strict=True):
            view(buffer, place).copy_(tensor)
        return {"transport": "socket", "places": places, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


CUDA_IPC = "cuda_ipc"
DIRECT = ("auto", CUDA_IPC)
"""Values of ``rollout.checkpoint_engine.backend`` with which weights stay on the GPU where they can."""


class Sender(Protocol):
    """Trainer's side of a transport."""

    def bytes_to_copy(self, tensor: Tensor) -> int:
        """Return the number of bytes that are copied for a tensor."""
        ...

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return a chunk with the tensors. The memory of the chunk before the previous one is reused."""
        ...

    def close(self) -> None:
        """Release memory and files."""
        ...


_THROUGH_HOST: dict[str, type[Sender]] = {
    "shared_memory": SharedMemorySender,
    "file": FileSender,
    "socket": SocketSender,
}


def make_sender(backend: str, *, same_machine: bool) -> Sender:
    """Create the sender of a ``rollout.checkpoint_engine.backend`` for weights in host memory.

    For ``auto`` and ``cuda_ipc`` that is shared memory on one machine, else the socket.
    """
    if backend in DIRECT:
        backend = "shared_memory" if same_machine else "socket"
    if backend not in _THROUGH_HOST:
        raise ConfigError(
            f"checkpoint_engine.backend={backend} cannot send weights to engine processes",
            why=f"the transports are {', '.join([*_THROUGH_HOST, CUDA_IPC])}",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=auto",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
        )
    return _THROUGH_HOST[backend]()

"""The trainer's side of transports, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hone.errors import ConfigError
from hone.generation.remote.transports.file import FileSender
from hone.generation.remote.transports.inline import SocketSender
from hone.generation.remote.transports.layout import Named
from hone.generation.remote.transports.shared_memory import SharedMemorySender

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

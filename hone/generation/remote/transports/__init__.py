"""Transports of weights from the trainer's process to an engine's process.

    cuda_ipc        memory of a GPU that both processes map, for an engine on the trainer's GPU (:mod:`.cuda_ipc`).
    shared_memory   memory that both processes map (Linux ``memfd``), for an engine of the same machine and user. The sender
                    copies once, or not at all if the model's parameters are in such memory (:func:`share_parameters`).
    file            a safetensors file in a directory that both processes can read.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the reference for the others.

:class:`Route` chooses between memory of the GPU and of the host. A sender packs tensors into chunks of a limited size, at least one tensor each. A chunk is a plain message; :func:`open_chunk`
returns its tensors on the engine's side. While the engine loads one chunk the next is packed: at most two are in flight
(:data:`CHUNKS_IN_FLIGHT`). Their buffers alternate, so each is mapped once and stays in the processor's cache.

:mod:`.layout` divides weights into chunks, :mod:`.route` has the choice and the engine's side.
"""

from __future__ import annotations

from hone.generation.remote.transports.cuda_ipc import CudaSender
from hone.generation.remote.transports.layout import CHUNK_BYTES, CHUNKS_IN_FLIGHT, Named, buckets, copy, padded, view
from hone.generation.remote.transports.route import (
    CUDA_IPC,
    FileSender,
    Mappings,
    Route,
    Sender,
    SocketSender,
    make_sender,
    open_chunk,
)
from hone.generation.remote.transports.shared_memory import SharedBuffer, SharedMemorySender, share_parameters

__all__ = [
    "CHUNKS_IN_FLIGHT",
    "CHUNK_BYTES",
    "CUDA_IPC",
    "CudaSender",
    "FileSender",
    "Mappings",
    "Named",
    "Route",
    "Sender",
    "SharedBuffer",
    "SharedMemorySender",
    "SocketSender",
    "buckets",
    "copy",
    "make_sender",
    "open_chunk",
    "padded",
    "share_parameters",
    "view",
]

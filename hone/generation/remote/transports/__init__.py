"""Transports of weights from the trainer's process to an engine's process.

    shared_memory   memory that both processes map (Linux ``memfd``), for an engine of the same machine and user. The sender
                    copies once, or not at all if the model's parameters are in such memory (:func:`share_parameters`).
    file            a safetensors file in a directory that both processes can read.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the reference for the others.

A sender packs tensors into chunks of a limited size, at least one tensor each. A chunk is a plain message; :func:`open_chunk`
returns its tensors on the engine's side. While the engine loads one chunk the next is packed: at most two are in flight
(:data:`CHUNKS_IN_FLIGHT`). Their buffers alternate, so each is mapped once and stays in the processor's cache.

:mod:`.layout` divides weights into chunks, :mod:`.senders` chooses a transport by name, :mod:`.receiving` is the engine's side.
"""

from __future__ import annotations

from hone.generation.remote.transports.file import FileSender
from hone.generation.remote.transports.inline import SocketSender
from hone.generation.remote.transports.layout import CHUNK_BYTES, CHUNKS_IN_FLIGHT, Named, buckets, copy, padded, view
from hone.generation.remote.transports.receiving import open_chunk
from hone.generation.remote.transports.senders import Sender, make_sender
from hone.generation.remote.transports.shared_memory import Mappings, SharedBuffer, SharedMemorySender, share_parameters

__all__ = [
    "CHUNK_BYTES",
    "CHUNKS_IN_FLIGHT",
    "Named",
    "buckets",
    "padded",
    "view",
    "copy",
    "Mappings",
    "SharedBuffer",
    "SharedMemorySender",
    "share_parameters",
    "FileSender",
    "SocketSender",
    "Sender",
    "make_sender",
    "open_chunk",
]

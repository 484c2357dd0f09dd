"""Memory of a GPU that two processes map (CUDA IPC), for an engine on the trainer's GPU: weights never leave the GPU.

    trainer   copies a chunk into a staging buffer of the GPU, and waits for its stream   --> message: places in the buffer
    engine    maps the buffer, once; copies the weights to their places, and waits for the GPU   --> answer: the buffer is free

A message has numbers and text only: nothing is pickled, as torch.multiprocessing would.

Staging buffers are outside of the allocator's expandable segments: what torch shares of those depends on the drivers, permissions
and torch versions of both processes. Torch counts the processes that map a buffer, to keep it for them. Here the protocol says
when they have read it, so a sender that closes releases the count of an engine that died.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.errors import GenerationError
from hone.generation.remote.gpus import uuid_of
from hone.generation.remote.transports.layout import CHUNKS_IN_FLIGHT, Named, Sender, layout, view

GPU_CHUNK_BYTES = 128 * 2**20
"""Maximum of bytes in a chunk with several tensors: a GPU copies it in a tenth of a millisecond, less than a message takes."""


class CudaSender(Sender):
    """Sends through staging buffers of ``chunk_bytes`` on a GPU, which alternate.

    A tensor that exceeds a chunk gets a buffer of its own size, until its memory may be reused.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = GPU_CHUNK_BYTES) -> None:
        self.device, self.chunk_bytes = device, chunk_bytes
        self._gpu = uuid_of(device)
        self._buffers: deque[StagingBuffer | None] = deque([None] * CHUNKS_IN_FLIGHT)
        self._oversized: deque[StagingBuffer | None] = deque([None] * CHUNKS_IN_FLIGHT)

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Copy tensors into the buffer that has been idle longest, and wait until they are there.

        Raises:
            RuntimeError: the GPU has no memory left, or torch cannot share it.
        """
        places, size = layout(tensors)
        buffer = self._next_buffer(size)
        filled = [(view(buffer.memory, place), t) for (_, t), place in zip(tensors, places, strict=True) if t.numel()]
        if filled:
            targets, sources = zip(*filled, strict=True)
            torch.ops.aten._foreach_copy_(list(targets), [source.detach() for source in sources])
        torch.cuda.current_stream(self.device).synchronize()
        kept = buffer.memory.numel() == self.chunk_bytes
        return {"transport": "cuda_ipc", "gpu": self._gpu, "buffer": buffer.handle, "kept": kept, "places": places}

    def release_oversized(self) -> None:
        """Release the buffers of tensors that exceed a chunk; no chunk is in flight."""
        for _ in range(CHUNKS_IN_FLIGHT):
            self._rotate(self._oversized)

    def close(self) -> None:
        """Release all buffers; no engine reads them any more."""
        self.release_oversized()
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = deque([None] * CHUNKS_IN_FLIGHT)

    def _next_buffer(self, size: int) -> StagingBuffer:
        self._buffers.rotate(-1)
        self._rotate(self._oversized)
        buffers, size = (self._oversized, size) if size > self.chunk_bytes else (self._buffers, self.chunk_bytes)
        buffer = buffers[-1]
        if buffer is None:
            buffer = buffers[-1] = StagingBuffer(size, self.device)
        return buffer

    @staticmethod
    def _rotate(oversized: deque[StagingBuffer | None]) -> None:
        """Release the buffer that has been idle longest."""
        if (idle := oversized.popleft()) is not None:
            idle.close()
        oversized.append(None)


class StagingBuffer:
    """Memory of a GPU that other processes can map.

    Attributes:
        memory: its ``size`` bytes.
        handle: what another process needs to map it.

    Raises:
        RuntimeError: the GPU has no memory left, or torch cannot share it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        from hone.models.devices import ordinary_segments  # the trainer's side: engines' environments do not import it

        with ordinary_segments():
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        _, handle, stored, offset, counter, counter_offset, _, _ = self.memory.untyped_storage()._share_cuda_()
        self.handle: dict[str, Any] = {
            "memory": base64.b64encode(handle).decode(),
            "bytes": stored,
            "offset": offset,
            "counter": base64.b64encode(counter).decode(),
            "counter_offset": counter_offset,
        }

    def close(self) -> None:
        counter = base64.b64decode(self.handle["counter"])
        torch.UntypedStorage._release_ipc_counter_cuda(counter, self.handle["counter_offset"])
        del self.memory


class DeviceMappings:
    """Mappings of staging buffers in an engine's process, kept between chunks."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[Any, ...], Tensor] = {}

    def get(self, chunk: dict[str, Any]) -> Tensor:
        """Return the bytes of a chunk's buffer, on the current GPU of this process.

        Raises:
            GenerationError: this process computes on another GPU.
            RuntimeError: CUDA cannot map the buffer.
        """
        key = tuple(chunk["buffer"].values())
        buffer = self._mapped.get(key)
        if buffer is None:
            buffer = _map(chunk)
            if chunk["kept"]:
                self._mapped = {**dict(list(self._mapped.items())[1 - 2 * CHUNKS_IN_FLIGHT :]), key: buffer}
        return buffer


def _map(chunk: dict[str, Any]) -> Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    if (gpu := uuid_of(device)) != chunk["gpu"]:
        raise GenerationError(
            f"the weights are in memory of GPU {chunk['gpu']}, but a process of the engine computes on {gpu}"
        )
    handle = chunk["buffer"]
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        base64.b64decode(handle["memory"]),
        handle["bytes"],
        handle["offset"],
        base64.b64decode(handle["counter"]),
        handle["counter_offset"],
        b"",
        False,  # the sender has waited for its stream: there is no event to wait for
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

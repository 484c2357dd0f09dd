"""Memory that both processes map (Linux ``memfd``), for an engine of the same machine and user."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.generation.remote.transports.layout import CHUNKS_IN_FLIGHT, Named, Sender, copy, layout, place_at, view


class SharedMemorySender(Sender):
    """Sends through memory buffers that the engine opens in ``/proc``.

    Buffers have no file names, so nothing remains after a crash, and they are not limited by the size of ``/dev/shm``.
    """

    def __init__(self) -> None:
        self._buffers = [SharedBuffer() for _ in range(CHUNKS_IN_FLIGHT)]

    def bytes_to_copy(self, tensor: Tensor) -> int:
        """Return 0 if the tensor is in shared memory already."""
        return 0 if _shared_buffer_of(tensor) is not None else tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return the place of tensors in shared memory; others are copied into the buffer that has been idle longest."""
        shared_chunk = _shared_chunk(tensors)
        if shared_chunk is not None:
            return shared_chunk
        buffer = self._buffers[0]
        self._buffers = [*self._buffers[1:], buffer]
        places, size = layout(tensors)
        memory = buffer.at_least(size)
        for (_, tensor), place in zip(tensors, places, strict=True):
            copy(tensor, view(memory, place))
        return _memory_chunk(buffer, places)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()


class SharedBuffer:
    """Memory that other processes of the same user can map."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Path under which other processes open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def at_least(self, size: int) -> Tensor:
        """Return the memory, grown to at least ``size`` bytes with its contents kept."""
        if size > self._memory.numel():
            if self._file is None:
                self._file = os.memfd_create("hone-weights")
            os.ftruncate(self._file, size)
            self._memory = torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=size, dtype=torch.uint8)
        return self._memory

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None


_SHARED_MODELS: dict[int, SharedBuffer] = {}
"""Shared memory of models, by its address."""


def share_parameters(model: nn.Module) -> bool:
    """Move the parameters of a model to shared memory, so that a weight sync needs no copy; return whether they were moved.

    An engine reads them there during a weight sync, and cannot write. Those of a sharded model, or on a GPU, stay.
    """
    parameters = dict(model.named_parameters())
    if not all(type(p.data) is Tensor and p.device.type == "cpu" and p.is_contiguous() for p in parameters.values()):
        return False
    places, size = layout([*parameters.items()])
    buffer = SharedBuffer()
    memory = buffer.at_least(size)
    for parameter, place in zip(parameters.values(), places, strict=True):
        parameter.data = view(memory, place).copy_(parameter.data)
    address = memory.untyped_storage().data_ptr()
    _SHARED_MODELS[address] = buffer
    weakref.finalize(model, _release_shared, address)
    return True


def _release_shared(address: int) -> None:
    _SHARED_MODELS.pop(address).close()


def _shared_buffer_of(tensor: Tensor) -> SharedBuffer | None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return _SHARED_MODELS.get(tensor.untyped_storage().data_ptr())


def _shared_chunk(tensors: Sequence[Named]) -> dict[str, Any] | None:
    """Return a chunk for tensors that are all in one shared buffer, else None."""
    buffers = {_shared_buffer_of(tensor) for _, tensor in tensors}
    buffer = buffers.pop() if len(buffers) == 1 else None
    if buffer is None:
        return None
    return _memory_chunk(buffer, [place_at(name, t, int(t.storage_offset()) * t.itemsize) for name, t in tensors])


def _memory_chunk(buffer: SharedBuffer, places: list[dict[str, Any]]) -> dict[str, Any]:
    return {"transport": "shared_memory", "path": buffer.path, "bytes": buffer.at_least(0).numel(), "places": places}


class MemoryMappings:
    """Read-only mappings of shared memory, kept because mapping costs as much as copying."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[tuple[int, int, int], Tensor]] = {}

    def get(self, path: str, size: int) -> Tensor:
        """Return the bytes at ``path``.

        Raises:
            OSError: the file does not exist.
        """
        status = Path(path).stat()
        identity = status.st_dev, status.st_ino, size
        mapped = self._mapped.get(path)
        if mapped is None or mapped[0] != identity:
            mapped = identity, _map(path, size)
            self._mapped = {**dict(list(self._mapped.items())[1 - 2 * CHUNKS_IN_FLIGHT :]), path: mapped}
        return mapped[1]


def _map(path: str, size: int) -> Tensor:
    with Path(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)

"""Transports of weights from the trainer's process to an engine's process.

    shared_memory   memory that both processes map (Linux ``memfd``), for an engine of the same machine and user. The sender
                    copies once, or not at all if the model's parameters are in such memory (:func:`share_parameters`).
    file            a safetensors file in a directory that both processes can read.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the reference for the others.

A sender packs tensors into chunks of a limited size, at least one tensor each. A chunk is a plain message; :func:`open_chunk`
returns its tensors on the engine's side. While the engine loads one chunk the next is packed: at most two are in flight
(:data:`CHUNKS_IN_FLIGHT`). Their buffers alternate, so each is mapped once and stays in the processor's cache.
"""

from __future__ import annotations

import base64
import contextlib
import math
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hone.errors import ConfigError, GenerationError

Named = tuple[str, Tensor]
_ALIGNED = 64
"""Alignment of tensors in a buffer, in bytes."""
CHUNKS_IN_FLIGHT = 2
"""Maximum of chunks in flight; a chunk's memory is reused after this many further chunks."""
CHUNK_BYTES = 32 * 2**20
"""Maximum of bytes in a chunk with several tensors; small chunks let the engine start early and stay in the processor's cache."""


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


class SharedMemorySender:
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
        places, size = _layout(tensors)
        memory = buffer.at_least(size)
        for (_, tensor), place in zip(tensors, places, strict=True):
            copy(tensor, view(memory, place))
        return _memory_chunk(buffer, places)

    def close(self) -> None:
        """Release the buffers."""
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
        """Release the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None


_SHARED_MODELS: dict[int, SharedBuffer] = {}
"""Shared memory of models, by its address."""


def share_parameters(model: nn.Module) -> bool:
    """Move the parameters of a model to shared memory, so that a weight sync needs no copy.

    An engine reads them there during a weight sync, and cannot write.

    Returns:
        Whether they were moved; parameters of a sharded model, or on a GPU, are not.
    """
    parameters = dict(model.named_parameters())
    if not all(type(p.data) is Tensor and p.device.type == "cpu" and p.is_contiguous() for p in parameters.values()):
        return False
    places, size = _layout([*parameters.items()])
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
    return _memory_chunk(buffer, [_place(name, t, int(t.storage_offset()) * t.itemsize) for name, t in tensors])


def _memory_chunk(buffer: SharedBuffer, places: list[dict[str, Any]]) -> dict[str, Any]:
    return {"transport": "shared_memory", "path": buffer.path, "bytes": buffer.at_least(0).numel(), "places": places}


class FileSender:
    """Safetensors files in a directory.

    Args:
        directory: that both processes can read; None creates a temporary one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

    def bytes_to_copy(self, tensor: Tensor) -> int:
        """Return the tensor's size."""
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write a file; the files of the chunks in flight stay."""
        from safetensors.torch import save_file

        self._count += 1
        path = Path(self._directory.name, f"{self._count}.safetensors")
        save_file(_without_shared_storage(tensors), path)
        self._paths.append(path)
        if len(self._paths) > CHUNKS_IN_FLIGHT:
            self._paths.pop(0).unlink()
        return {"transport": "file", "path": str(path), "names": [name for name, _ in tensors]}

    def close(self) -> None:
        """Remove the directory."""
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
    """Sends weights inside the messages."""

    def bytes_to_copy(self, tensor: Tensor) -> int:
        """Return the tensor's size."""
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return a chunk with the tensors' bytes as text."""
        places, size = _layout(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), place in zip(tensors, places, strict=True):
            view(buffer, place).copy_(tensor)
        return {"transport": "socket", "places": places, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def make_sender(backend: str, *, same_machine: bool) -> Sender:
    """Create the sender of a ``rollout.checkpoint_engine.backend``; ``auto`` is shared memory on one machine, else the socket.

    Raises:
        ConfigError: the transport is unknown.
    """
    if backend == "auto":
        backend = "shared_memory" if same_machine else "socket"
    kinds: dict[str, type[Sender]] = {"shared_memory": SharedMemorySender, "file": FileSender, "socket": SocketSender}
    if backend not in kinds:
        raise ConfigError(
            f"checkpoint_engine.backend={backend} cannot send weights to engine processes",
            why=f"the transports are {', '.join(kinds)}",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=auto",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
        )
    return kinds[backend]()


def buckets(
    tensors: Iterable[Named], most_bytes: int, size_of: Callable[[Tensor], int] = lambda tensor: tensor.nbytes
) -> Iterator[tuple[list[Named], bool]]:
    """Yield chunks of at most ``most_bytes`` (at least one tensor), and whether each is the last.

    Weights of one block, such as ``model.layers.3.mlp``, stay together if they fit, because engines fuse some of them.

    Args:
        tensors: by name.
        most_bytes: maximum size of a chunk.
        size_of: returns the size of a tensor in bytes.
    """
    bucket: list[Named] = []
    used = 0
    for block, size in _blocks(tensors, most_bytes, size_of):
        if bucket and used + size > most_bytes:
            yield bucket, False
            bucket, used = [], 0
        bucket += block
        used += size
    yield bucket, True


def _blocks(
    tensors: Iterable[Named], most_bytes: int, size_of: Callable[[Tensor], int]
) -> Iterator[tuple[list[Named], int]]:
    """Yield neighbours with the same name prefix, and their size; a group that is too large is split."""
    block: list[Named] = []
    size = 0
    for name, tensor in tensors:
        added = size_of(tensor)
        if block and (_block_of(name) != _block_of(block[0][0]) or size + added > most_bytes):
            yield block, size
            block, size = [], 0
        block.append((name, tensor))
        size += added
    if block:
        yield block, size


def _block_of(name: str) -> str:
    return ".".join(name.split(".")[:-2])


class Mappings:
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


@contextlib.contextmanager
def open_chunk(chunk: dict[str, Any], mappings: Mappings | None = None) -> Iterator[list[Named]]:
    """Give the tensors of a chunk, on the engine's side; they are views that are valid only inside the block.

    Args:
        chunk: from the sender.
        mappings: kept between chunks; None maps shared memory for this chunk only.

    Raises:
        GenerationError: the chunk's file or memory cannot be opened.
    """
    kind = chunk["transport"]
    if kind == "socket":
        buffer = torch.frombuffer(bytearray(base64.b64decode(chunk["data"])), dtype=torch.uint8)
        yield [(place["name"], view(buffer, place)) for place in chunk["places"]]
        return
    try:
        if kind == "file":
            from safetensors.torch import load_file

            loaded = load_file(chunk["path"])
            named = [(name, loaded[name]) for name in chunk["names"]]
        else:
            buffer = (mappings or Mappings()).get(chunk["path"], chunk["bytes"])
            named = [(place["name"], view(buffer, place)) for place in chunk["places"]]
    except (OSError, RuntimeError) as error:
        raise GenerationError(
            f"the engine cannot open new weights at {chunk['path']}: {error}",
            why="it runs on another machine, in another container or as another user",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
        ) from error
    yield named


def copy(source: Tensor, target: Tensor) -> None:
    """Copy on one core, because the engine is busy on the others and contending threads are slower."""
    if source.device.type == "cpu" and source.is_contiguous() and source.numel():
        target.reshape(-1).view(torch.uint8).numpy()[:] = source.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        target.copy_(source)


def padded(size: int) -> int:
    """Return the aligned size of ``size`` bytes."""
    return math.ceil(size / _ALIGNED) * _ALIGNED


def _layout(tensors: Sequence[Named]) -> tuple[list[dict[str, Any]], int]:
    """Return the place of each tensor in a buffer, and the size of the buffer in bytes."""
    places, offset = [], 0
    for name, tensor in tensors:
        places.append(_place(name, tensor, offset))
        offset += padded(tensor.nbytes)
    return places, max(offset, _ALIGNED)


def _place(name: str, tensor: Tensor, offset: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


def view(buffer: Tensor, place: dict[str, Any]) -> Tensor:
    """Return the tensor at a place of a buffer."""
    dtype: torch.dtype = getattr(torch, place["dtype"])
    size = math.prod(place["shape"]) * dtype.itemsize
    return buffer[place["offset"] : place["offset"] + size].view(dtype).view(place["shape"])

"""Transports of weights from the trainer's process to an engine's process.

    cuda_ipc        memory of a GPU that both processes map, for an engine on the trainer's GPU (:class:`CudaSender`).
    shared_memory   memory that both processes map (Linux ``memfd``), for an engine of the same machine and user. The sender
                    copies once, or not at all if the model's parameters are in such memory (:func:`share_parameters`).
    file            a safetensors file in a directory that both processes can read.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the reference for the others.

:class:`Route` chooses between memory of the GPU and of the host. A sender packs tensors into chunks of a limited size, at least one
tensor each (:func:`buckets`). A chunk is a plain message; :func:`open_chunk` returns its tensors on the engine's side. While the engine
loads one chunk the next is packed: at most two are in flight (:data:`CHUNKS_IN_FLIGHT`). Their buffers alternate, so each is mapped
once and stays in the processor's cache.

By ``cuda_ipc`` weights never leave the GPU:

    trainer   copies a chunk into a staging buffer of the GPU, and waits for its stream   --> message: places in the buffer
    engine    maps the buffer, once; copies the weights to their places, and waits for the GPU   --> answer: the buffer is free

A message has numbers and text only: nothing is pickled, as torch.multiprocessing would.

Staging buffers are outside of the allocator's expandable segments: what torch shares of those depends on the drivers, permissions
and torch versions of both processes. Torch counts the processes that map a buffer, to keep it for them. Here the protocol says
when they have read it, so a sender that closes releases the count of an engine that died.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import mmap
import os
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hone.errors import ConfigError, GenerationError
from hone.generation.remote.gpus import uuid_of

Named = tuple[str, Tensor]
_ALIGNED = 64
"""Alignment of tensors in a buffer, in bytes."""
CHUNKS_IN_FLIGHT = 2
"""Maximum of chunks in flight; a chunk's memory is reused after this many further chunks."""
CHUNK_BYTES = 32 * 2**20
"""Maximum of bytes in a chunk with several tensors; small chunks let the engine start early and stay in the processor's cache."""


def buckets(
    tensors: Iterable[Named], most_bytes: int, size_of: Callable[[Tensor], int] = lambda tensor: tensor.nbytes
) -> Iterator[tuple[list[Named], bool]]:
    """Yield chunks of at most ``most_bytes`` (at least one tensor), and whether each is the last.

    Weights of one block, such as ``model.layers.3.mlp``, stay together if they fit, because engines fuse some of them.
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


class Sender(Protocol):
    """Trainer's side of a transport."""

    def bytes_to_copy(self, tensor: Tensor) -> int:
        """Return the number of bytes that are copied for a tensor."""
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return a chunk with the tensors. The memory of the chunk before the previous one is reused."""
        ...

    def close(self) -> None:
        """Release memory and files, if there are any."""


def copy(source: Tensor, target: Tensor) -> None:
    """Copy on one core, because the engine is busy on the others and contending threads are slower."""
    if source.device.type == "cpu" and source.is_contiguous() and source.numel():
        target.reshape(-1).view(torch.uint8).numpy()[:] = source.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        target.copy_(source)


def padded(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED


def layout(tensors: Sequence[Named]) -> tuple[list[dict[str, Any]], int]:
    """Return the place of each tensor in a buffer, and the size of the buffer in bytes."""
    places, offset = [], 0
    for name, tensor in tensors:
        places.append(place_at(name, tensor, offset))
        offset += padded(tensor.nbytes)
    return places, max(offset, _ALIGNED)


def place_at(name: str, tensor: Tensor, offset: int) -> dict[str, Any]:
    """Return the description of a tensor at ``offset`` bytes of a buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


def view(buffer: Tensor, place: dict[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, place["dtype"])
    size = math.prod(place["shape"]) * dtype.itemsize
    return buffer[place["offset"] : place["offset"] + size].view(dtype).view(place["shape"])


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
            mapped = identity, _map_memory(path, size)
            self._mapped = {**dict(list(self._mapped.items())[1 - 2 * CHUNKS_IN_FLIGHT :]), path: mapped}
        return mapped[1]


def _map_memory(path: str, size: int) -> Tensor:
    with Path(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


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
            buffer = _map_device(chunk)
            if chunk["kept"]:
                self._mapped = {**dict(list(self._mapped.items())[1 - 2 * CHUNKS_IN_FLIGHT :]), key: buffer}
        return buffer


def _map_device(chunk: dict[str, Any]) -> Tensor:
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


class FileSender(Sender):
    """Safetensors files in a directory that both processes can read; None creates a temporary one."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

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


class SocketSender(Sender):
    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        places, size = layout(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), place in zip(tensors, places, strict=True):
            view(buffer, place).copy_(tensor)
        return {"transport": "socket", "places": places, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}


CUDA_IPC = "cuda_ipc"
DIRECT = ("auto", CUDA_IPC)
"""Values of ``rollout.checkpoint_engine.backend`` with which weights stay on the GPU where they can."""


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


log = logging.getLogger("hone.generation.remote")


class Route:
    """The transports of weights to one engine.

    Weights on the engine's GPU stay on it, if the engine can map memory of the trainer (:class:`CudaSender`). All others, such as the
    copies for a replica that starts again, go through the host.

    Attributes:
        host: sender through the host.
        direct: sender on the GPU; None before the first weights on a GPU, and where they cannot stay on it.
        transport: of the last chunk.
        obstacle: why weights do not stay on the GPU; empty if they can, or if the configured transport is another one.
        fallbacks: number of times that the engine could not map memory of the GPU.
    """

    def __init__(self, backend: str, *, engine: str, gpus: Sequence[str], same_machine: bool, delta: bool) -> None:
        self.host, self.direct = make_sender(backend, same_machine=same_machine), None
        self.transport = self.obstacle = ""
        self.fallbacks = 0
        self._engine, self._gpus, self._wanted = engine, gpus, backend == CUDA_IPC
        self._usable, self._opened = backend in DIRECT, False
        if self._usable:
            self._note_obstacle(_obstacle(gpus, same_machine=same_machine, delta=delta))

    @property
    def untested(self) -> CudaSender | None:
        """Sender on the GPU as long as it is unknown whether the engine can map its memory; else None."""
        return None if self._opened else self.direct

    def begin(self, weights: Tensor) -> None:
        """Choose for weights on the device of a tensor, before the first chunk of a version."""
        if not self._usable or self.direct is not None or weights.device.type != "cuda":
            return
        if uuid_of(weights.device) != self._gpus[0]:
            self._note_obstacle("the engine computes on another GPU than the one with the weights")
        else:
            self.direct = CudaSender(weights.device)

    def opened(self) -> None:
        """Note that the engine can map memory of the GPU."""
        self._opened = True

    def fall_back(self, problem: str) -> None:
        """Send weights through the host from now on, because the engine could not map memory of the GPU."""
        self.fallbacks += 1
        self._wanted = True  # to be warned of
        self._note_obstacle(problem)

    def sender_for(self, tensors: Sequence[Named]) -> CudaSender | None:
        """Return the sender on the GPU if all tensors are there, and the engine can map its memory; else None: the host."""
        direct = self.direct if self._opened and tensors else None
        return direct if direct is not None and all(tensor.device == direct.device for _, tensor in tensors) else None

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return a chunk with the tensors; one for which the GPU lacks memory goes through the host."""
        direct, chunk = self.sender_for(tensors), None
        if direct is not None:
            try:
                chunk = direct.pack(tensors)
            except torch.OutOfMemoryError as error:
                log.warning("weights for engine %s go through the host once: %s", self._engine, error)
        chunk = chunk or self.host.pack(tensors)
        self.transport = chunk["transport"]
        return chunk

    def finish(self) -> None:
        """Release memory that only this version needed; no chunk is in flight."""
        if self.direct is not None:
            self.direct.release_oversized()

    def close(self) -> None:
        """Release memory and files; the engine reads no chunk any more."""
        self.host.close()
        if self.direct is not None:
            self.direct.close()

    def _note_obstacle(self, obstacle: str) -> None:
        if not obstacle:
            return
        if self._wanted:
            log.warning("weights for engine %s go through the host, not by cuda_ipc: %s", self._engine, obstacle)
        if self.direct is not None:
            self.direct.close()
        self.obstacle, self.direct, self._usable, self._opened = obstacle, None, False, False


def _obstacle(gpus: Sequence[str], *, same_machine: bool, delta: bool) -> str:
    """Return why weights cannot stay on the GPU of an engine, or nothing."""
    if not same_machine:
        return "the engine is on another machine"
    if delta:
        return "checkpoint_engine.delta compares weights in memory of the host"
    if not gpus:
        return "the engine does not load weights on a GPU"
    if len(gpus) > 1:
        return f"the engine computes on {len(gpus)} GPUs, and mapping memory of another GPU is not verified"
    return ""


class Mappings:
    """Mappings of the trainer's memory in this process, kept between chunks because mapping costs as much as copying."""

    def __init__(self) -> None:
        self.memory, self.device = MemoryMappings(), DeviceMappings()


@contextlib.contextmanager
def open_chunk(chunk: dict[str, Any], mappings: Mappings | None = None) -> Iterator[list[Named]]:
    """Give the tensors of a chunk, on the engine's side; they are views that are valid only inside the block.

    Without ``mappings``, which are kept between chunks, memory is mapped for this chunk only.

    Raises:
        GenerationError: the chunk's file or memory cannot be opened.
    """
    mappings = mappings or Mappings()
    match chunk["transport"]:
        case "socket":
            buffer = torch.frombuffer(bytearray(base64.b64decode(chunk["data"])), dtype=torch.uint8)
            yield _views(buffer, chunk)
        case "cuda_ipc":
            yield from _on_gpu(chunk, mappings)
        case kind:
            try:
                named = (
                    _file(chunk)
                    if kind == "file"
                    else _views(mappings.memory.get(chunk["path"], chunk["bytes"]), chunk)
                )
            except (OSError, RuntimeError) as error:
                raise GenerationError(
                    f"the engine cannot open new weights at {chunk['path']}: {error}",
                    why="it runs on another machine, in another container or as another user",
                    fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
                ) from error
            yield named


def _on_gpu(chunk: dict[str, Any], mappings: Mappings) -> Iterator[list[Named]]:
    """Yield a chunk's tensors on the GPU. Afterwards wait for all that reads them, because the sender reuses their memory."""
    try:
        buffer = mappings.device.get(chunk)
    except RuntimeError as error:
        raise GenerationError(
            f"the engine cannot map the trainer's memory of the GPU: {error}",
            why="it runs in another container, or the driver does not permit it",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
        ) from error
    try:
        yield _views(buffer, chunk)
    finally:
        torch.cuda.synchronize(buffer.device)


def _file(chunk: dict[str, Any]) -> list[Named]:
    from safetensors.torch import load_file

    loaded = load_file(chunk["path"])
    return [(name, loaded[name]) for name in chunk["names"]]


def _views(buffer: Tensor, chunk: dict[str, Any]) -> list[Named]:
    return [(place["name"], view(buffer, place)) for place in chunk["places"]]

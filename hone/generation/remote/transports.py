"""How weights get from the trainer's process into an engine's: interchangeable transports, one slow and simple.

    shared_memory   memory that both processes map (Linux ``memfd``): read where it lies, by an engine of the same machine and user. One
                    copy in, or none where the model itself lives in such memory (:func:`settle`).
    file            a safetensors file in a directory that both see.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the others are tested against it.

A sender packs tensors into parcels of a limited size (but at least one tensor each). A parcel is a plain message; :func:`opened`
gives the tensors in it, on the engine's side. While the engine takes one parcel the next is packed: two are under way at most
(:data:`AHEAD`), and memory goes back and forth between them, so that it is mapped once and stays in the processor's cache.
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
"""Tensors begin at multiples of this in a buffer."""
AHEAD = 2
"""Parcels that may be under way: what a parcel held may be gone when as many were packed after it."""
PARCEL_BYTES = 32 * 2**20
"""Most bytes of a parcel, unless a tensor has more: few enough that the engine soon has something to do, and finds it in the cache."""


class Sender(Protocol):
    """The trainer's side of a transport."""

    def room(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes on its way."""
        ...

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Put tensors where the engine finds them, and say where. What the parcel before the last one held is gone then."""
        ...

    def close(self) -> None:
        """Give memory and files back."""
        ...


class SharedMemorySender:
    """Buffers in memory that the engine opens through ``/proc``: they have no names in the file system, so nothing is left behind
    however either process ends, and they are not bounded by the size of ``/dev/shm``.
    """

    def __init__(self) -> None:
        self._buffers = [SharedBuffer() for _ in range(AHEAD)]

    def room(self, tensor: Tensor) -> int:
        """None where it is not copied."""
        return 0 if _home_of(tensor) is not None else tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Say where tensors live, if that is memory which others can map; else copy them into the buffer that has been idle
        longest, which grows when they need more.
        """
        settled = _where_settled(tensors)
        if settled is not None:
            return settled
        buffer = self._buffers[0]
        self._buffers = [*self._buffers[1:], buffer]
        pieces, size = _places(tensors)
        memory = buffer.at_least(size)
        for (_, tensor), piece in zip(tensors, pieces, strict=True):
            copy(tensor, view(memory, piece))
        return _shared(buffer, pieces)

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            buffer.close()


class SharedBuffer:
    """Memory that other processes of this user can map."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Where others find it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def at_least(self, size: int) -> Tensor:
        """The memory, of so many bytes or more; what it holds stays when it grows."""
        if size > self._memory.numel():
            if self._file is None:
                self._file = os.memfd_create("hone-weights")
            os.ftruncate(self._file, size)
            self._memory = torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=size, dtype=torch.uint8)
        return self._memory

    def close(self) -> None:
        """Give it back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None


_SETTLED: dict[int, SharedBuffer] = {}
"""Memory that models live in, by its address."""


def settle(model: nn.Module) -> bool:
    """Let the parameters of a model live in memory that engines can map: then its weights are published without a copy.

    An engine reads them there while a publication waits for its answer; it cannot write.

    Returns:
        Whether they do; those of a divided model, or on a GPU, stay where they are.
    """
    parameters = dict(model.named_parameters())
    if not all(type(p.data) is Tensor and p.device.type == "cpu" and p.is_contiguous() for p in parameters.values()):
        return False
    pieces, size = _places([*parameters.items()])
    buffer = SharedBuffer()
    memory = buffer.at_least(size)
    for parameter, piece in zip(parameters.values(), pieces, strict=True):
        parameter.data = view(memory, piece).copy_(parameter.data)
    address = memory.untyped_storage().data_ptr()
    _SETTLED[address] = buffer
    weakref.finalize(model, _unsettle, address)
    return True


def _unsettle(address: int) -> None:
    _SETTLED.pop(address).close()


def _home_of(tensor: Tensor) -> SharedBuffer | None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return _SETTLED.get(tensor.untyped_storage().data_ptr())


def _where_settled(tensors: Sequence[Named]) -> dict[str, Any] | None:
    """The parcel of tensors that all live in one settled memory."""
    homes = {_home_of(tensor) for _, tensor in tensors}
    home = homes.pop() if len(homes) == 1 else None
    if home is None:
        return None
    return _shared(home, [_piece(name, t, int(t.storage_offset()) * t.itemsize) for name, t in tensors])


def _shared(buffer: SharedBuffer, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"transport": "shared_memory", "path": buffer.path, "bytes": buffer.at_least(0).numel(), "pieces": pieces}


class FileSender:
    """Safetensors files in a directory.

    Args:
        directory: that both processes see; None is a temporary one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

    def room(self, tensor: Tensor) -> int:
        """What it has."""
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write a file; the last ones stay."""
        from safetensors.torch import save_file

        self._count += 1
        path = Path(self._directory.name, f"{self._count}.safetensors")
        save_file(_apart(tensors), path)
        self._paths.append(path)
        if len(self._paths) > AHEAD:
            self._paths.pop(0).unlink()
        return {"transport": "file", "path": str(path), "names": [name for name, _ in tensors]}

    def close(self) -> None:
        """Remove the directory."""
        self._directory.cleanup()


def _apart(tensors: Sequence[Named]) -> dict[str, Tensor]:
    """Tensors none of which lies in the memory of another, which safetensors would refuse."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        memory = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if memory in taken else whole
        taken.add(memory)
    return found


class SocketSender:
    """Weights inside the messages themselves."""

    def room(self, tensor: Tensor) -> int:
        """What it has."""
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write the tensors' bytes as text."""
        pieces, size = _places(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), piece in zip(tensors, pieces, strict=True):
            view(buffer, piece).copy_(tensor)
        return {"transport": "socket", "pieces": pieces, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}

    def close(self) -> None:
        """Nothing is held."""


def make_sender(backend: str, *, same_machine: bool) -> Sender:
    """The sender that ``rollout.checkpoint_engine.backend`` names; ``auto`` is shared memory on one machine, else the socket.

    Raises:
        ConfigError: no such transport.
    """
    if backend == "auto":
        backend = "shared_memory" if same_machine else "socket"
    kinds: dict[str, type[Sender]] = {"shared_memory": SharedMemorySender, "file": FileSender, "socket": SocketSender}
    if backend not in kinds:
        raise ConfigError(
            f"weights cannot travel by '{backend}' yet",
            why=f"an engine in another process takes them by {', '.join(kinds)}",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=auto",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
        )
    return kinds[backend]()


def buckets(
    tensors: Iterable[Named], most_bytes: int, room: Callable[[Tensor], int] = lambda tensor: tensor.nbytes
) -> Iterator[tuple[list[Named], bool]]:
    """Tensors in portions of at most ``most_bytes`` (but at least one), each with whether it is the last.

    Weights of one block, such as ``model.layers.3.mlp``, stay together where they fit: engines join some of them.

    Args:
        tensors: by name.
        most_bytes: of a portion.
        room: bytes of a tensor that count.
    """
    bucket: list[Named] = []
    used = 0
    for block, size in _blocks(tensors, most_bytes, room):
        if bucket and used + size > most_bytes:
            yield bucket, False
            bucket, used = [], 0
        bucket += block
        used += size
    yield bucket, True


def _blocks(
    tensors: Iterable[Named], most_bytes: int, room: Callable[[Tensor], int]
) -> Iterator[tuple[list[Named], int]]:
    """Neighbours whose names have the same beginning, and their bytes; one that is too large is cut."""
    block: list[Named] = []
    size = 0
    for name, tensor in tensors:
        added = room(tensor)
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
    """Shared memory that is mapped already, to be read: mapping it anew for every parcel costs as much as copying it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int, int], Tensor]] = {}

    def of(self, path: str, size: int) -> Tensor:
        """The bytes at ``path``.

        Raises:
            OSError: there are none.
        """
        found = Path(path).stat()
        identity = found.st_dev, found.st_ino, size
        known = self._known.get(path)
        if known is None or known[0] != identity:
            known = identity, _mapped(path, size)
            self._known = {**dict(list(self._known.items())[1 - 2 * AHEAD :]), path: known}
        return known[1]


def _mapped(path: str, size: int) -> Tensor:
    with Path(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


@contextlib.contextmanager
def opened(parcel: dict[str, Any], mappings: Mappings | None = None) -> Iterator[list[Named]]:
    """The tensors of a parcel, on the engine's side; views that hold only inside the block.

    Args:
        parcel: as the sender gave it.
        mappings: that the receiver keeps between parcels; None maps shared memory for this parcel alone.

    Raises:
        GenerationError: they are not where the parcel says.
    """
    kind = parcel["transport"]
    if kind == "socket":
        buffer = torch.frombuffer(bytearray(base64.b64decode(parcel["data"])), dtype=torch.uint8)
        yield [(piece["name"], view(buffer, piece)) for piece in parcel["pieces"]]
        return
    try:
        if kind == "file":
            from safetensors.torch import load_file

            found = load_file(parcel["path"])
            named = [(name, found[name]) for name in parcel["names"]]
        else:
            buffer = (mappings or Mappings()).of(parcel["path"], parcel["bytes"])
            named = [(piece["name"], view(buffer, piece)) for piece in parcel["pieces"]]
    except (OSError, RuntimeError) as error:
        raise GenerationError(
            f"the engine does not find new weights at {parcel['path']}: {error}",
            why="it runs on another machine, in another container or as another user",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
        ) from error
    yield named


def copy(source: Tensor, target: Tensor) -> None:
    """Copy on one core: the engine is busy on the others, and threads of both that wait for each other's cores are slower than one."""
    if source.device.type == "cpu" and source.is_contiguous() and source.numel():
        target.reshape(-1).view(torch.uint8).numpy()[:] = source.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        target.copy_(source)


def padded(size: int) -> int:
    """Bytes that so many take in a buffer."""
    return math.ceil(size / _ALIGNED) * _ALIGNED


def _places(tensors: Sequence[Named]) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor goes in a buffer, and the size of the buffer in bytes."""
    pieces, offset = [], 0
    for name, tensor in tensors:
        pieces.append(_piece(name, tensor, offset))
        offset += padded(tensor.nbytes)
    return pieces, max(offset, _ALIGNED)


def _piece(name: str, tensor: Tensor, offset: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


def view(buffer: Tensor, piece: dict[str, Any]) -> Tensor:
    """The tensor that a piece of a parcel says lies in the buffer."""
    dtype: torch.dtype = getattr(torch, piece["dtype"])
    size = math.prod(piece["shape"]) * dtype.itemsize
    return buffer[piece["offset"] : piece["offset"] + size].view(dtype).view(piece["shape"])

"""How weights get from the trainer's process into an engine's: interchangeable transports, one slow and simple.

    shared_memory   a buffer that both processes map (Linux ``memfd``): one copy in, read where it lies. The same machine and user.
    file            a safetensors file in a directory that both see.
    socket          inside the messages of the connection, as text: slow, works everywhere, and the others are tested against it.

A sender packs tensors into parcels, at most a bucket of bytes each (but at least one tensor). A parcel is a plain message;
:func:`opened` gives the tensors in it, on the engine's side.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.errors import ConfigError, GenerationError

Named = tuple[str, Tensor]
_ALIGNED = 64
"""Tensors begin at multiples of this in a buffer."""
_SOCKET_BYTES = 64 * 2**20
"""Most bytes of weights in one message."""


class Sender(Protocol):
    """The trainer's side of a transport."""

    bucket_bytes: int

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Put tensors where the engine finds them, and say where. What the parcel before held may be gone then."""
        ...

    def close(self) -> None:
        """Give memory and files back."""
        ...


class SharedMemorySender:
    """A buffer in memory that the engine opens through ``/proc``: it has no name in the file system, so nothing is left behind
    however either process ends, and it is not bounded by the size of ``/dev/shm``.

    Args:
        bucket_bytes: of a parcel.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._file: int | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Copy tensors into the buffer, which grows when they need more."""
        pieces, size = _places(tensors)
        if size > self._buffer.numel():
            self._grow(size)
        for (_, tensor), piece in zip(tensors, pieces, strict=True):
            _view(self._buffer, piece).copy_(tensor)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return {"transport": "shared_memory", "path": path, "bytes": self._buffer.numel(), "pieces": pieces}

    def _grow(self, size: int) -> None:
        self.close()
        self._file = os.memfd_create("hone-weights")
        os.ftruncate(self._file, size)
        self._buffer = torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=size, dtype=torch.uint8)

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None


class FileSender:
    """Safetensors files in a directory.

    Args:
        bucket_bytes: of a file.
        directory: that both processes see; None is a temporary one.
    """

    def __init__(self, bucket_bytes: int, directory: str | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._path: Path | None = None
        self._count = 0

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write a file; the one before is removed."""
        from safetensors.torch import save_file

        self._count += 1
        path = Path(self._directory.name, f"{self._count}.safetensors")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, path)
        if self._path is not None:
            self._path.unlink()
        self._path = path
        return {"transport": "file", "path": str(path), "names": [name for name, _ in tensors]}

    def close(self) -> None:
        """Remove the directory."""
        self._directory.cleanup()


class SocketSender:
    """Weights inside the messages themselves.

    Args:
        bucket_bytes: of a parcel; at most 64 MiB are sent at once.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = min(bucket_bytes, _SOCKET_BYTES)

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Write the tensors' bytes as text."""
        pieces, size = _places(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), piece in zip(tensors, pieces, strict=True):
            _view(buffer, piece).copy_(tensor)
        return {"transport": "socket", "pieces": pieces, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}

    def close(self) -> None:
        """Nothing is held."""


def make_sender(backend: str, bucket_bytes: int, *, same_machine: bool) -> Sender:
    """The sender that ``rollout.checkpoint_engine.backend`` names; ``auto`` is shared memory on one machine, else the socket.

    Raises:
        ConfigError: no such transport.
    """
    if backend == "auto":
        backend = "shared_memory" if same_machine else "socket"
    kinds = {"shared_memory": SharedMemorySender, "file": FileSender, "socket": SocketSender}
    if backend not in kinds:
        raise ConfigError(
            f"weights cannot travel by '{backend}' yet",
            why=f"an engine in another process takes them by {', '.join(kinds)}",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=auto",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
        )
    return kinds[backend](bucket_bytes)


def buckets(tensors: Iterable[Named], most_bytes: int) -> Iterator[tuple[list[Named], bool]]:
    """Tensors in portions of at most ``most_bytes`` (but at least one), each with whether it is the last."""
    bucket: list[Named] = []
    used = 0
    for name, tensor in tensors:
        if bucket and used + tensor.nbytes > most_bytes:
            yield bucket, False
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    yield bucket, True


@contextlib.contextmanager
def opened(parcel: dict[str, Any]) -> Iterator[list[Named]]:
    """The tensors of a parcel, on the engine's side; views that hold only inside the block.

    Raises:
        GenerationError: they are not where the parcel says.
    """
    kind = parcel["transport"]
    if kind == "socket":
        buffer = torch.frombuffer(bytearray(base64.b64decode(parcel["data"])), dtype=torch.uint8)
        yield [(piece["name"], _view(buffer, piece)) for piece in parcel["pieces"]]
        return
    try:
        if kind == "file":
            from safetensors.torch import load_file

            found = load_file(parcel["path"])
            named = [(name, found[name]) for name in parcel["names"]]
        else:
            buffer = torch.from_file(parcel["path"], shared=True, size=parcel["bytes"], dtype=torch.uint8)
            named = [(piece["name"], _view(buffer, piece)) for piece in parcel["pieces"]]
    except (OSError, RuntimeError) as error:
        raise GenerationError(
            f"the engine does not find new weights at {parcel['path']}: {error}",
            why="it runs on another machine, in another container or as another user",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
        ) from error
    yield named


def _places(tensors: Sequence[Named]) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor goes in a buffer, and the size of the buffer in bytes."""
    pieces, offset = [], 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        offset += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
    return pieces, max(offset, _ALIGNED)


def _view(buffer: Tensor, piece: dict[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, piece["dtype"])
    size = math.prod(piece["shape"]) * dtype.itemsize
    return buffer[piece["offset"] : piece["offset"] + size].view(dtype).view(piece["shape"])

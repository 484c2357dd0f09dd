"""The layout of chunks: which tensors are in a chunk, and where each is in its buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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

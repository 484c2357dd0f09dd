"""The pages in use, with the number of their users, and the keys and values of all pages of all layers in one tensor.

Small transfers between host and device (:func:`to_device`, :class:`Readback`) do not make the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.models.attention.paged import PAGE


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, or a tensor of the host, as a tensor on ``device``; on CUDA the copy is asynchronous, from pinned memory."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Readback:
    """Copies of a step's at most ``numbers`` int32 results to the host, at most two of them under way."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        self._on_cuda, self._turn = device.type == "cuda", 0
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []
        if self._on_cuda:
            self._buffers = [torch.empty(numbers, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self._events = [torch.cuda.Event() for _ in range(2)]

    def send(self, results: Tensor) -> Arriving:
        """Begin the copy of contiguous int32 ``results``."""
        if not self._on_cuda:
            return Arriving(results.to("cpu", copy=True), None)
        self._turn = 1 - self._turn
        buffer, event = self._buffers[self._turn][: results.numel()].view(results.shape), self._events[self._turn]
        buffer.copy_(results, non_blocking=True)
        event.record()
        return Arriving(buffer, event)


class Arriving:
    """Results on their way to the host."""

    def __init__(self, buffer: Tensor, event: Any) -> None:
        self._buffer, self._event = buffer, event

    def wait(self) -> Tensor:
        """Wait for the results and return them in memory that later copies do not change."""
        if self._event is None:
            return self._buffer
        self._event.synchronize()
        return self._buffer.clone()


SCRATCH = 0
"""The page of rows that only fill up a batch; it belongs to no sequence."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than a caller needs."""


class Pages:
    """Pages ``1 .. count - 1`` of a pool; page 0 is :data:`SCRATCH`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._free = list(range(count - 1, SCRATCH, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of pages with a user."""
        return self.count - 1 - self.free

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Return free pages, each with one user.

        Raises:
            OutOfPages: fewer are free; none is taken.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages are needed, {self.free} of {self.count - 1} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to pages that are in use."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from pages; those without another are free."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free already"
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


def pages_for(tokens: int, size: int) -> int:
    """Return how many pages of ``size`` tokens hold ``tokens`` tokens."""
    return -(-tokens // size)


@dataclass(frozen=True)
class PageShape:
    """Sizes of a page."""

    layers: int
    kv_heads: int  # of a layer
    head_dim: int  # width of keys, and of values
    dtype: torch.dtype  # of both
    tokens: int = PAGE

    @property
    def bytes(self) -> int:
        return 2 * self.layers * self.tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagePool:
    """Keys and values ``[layers, 2, pages, tokens, kv_heads, head_dim]``; all zero at first: rows that fill up a batch read numbers."""

    def __init__(self, shape: PageShape, count: int, device: torch.device) -> None:
        self.page_tokens = shape.tokens
        size = (shape.layers, 2, count, shape.tokens, shape.kv_heads, shape.head_dim)
        self._kv = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._kv.device

    @property
    def dtype(self) -> torch.dtype:
        return self._kv.dtype

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[pages, tokens, kv_heads, head_dim]``."""
        return self._kv[layer, 0], self._kv[layer, 1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values ``[N, kv_heads, head_dim]`` into ``slots [N]``: page times tokens of a page, plus place in it."""
        for pages, states in zip(self.layer(layer), (keys, values), strict=True):
            pages.flatten(0, 1).index_copy_(0, slots, states.to(pages.dtype))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of all layers: ``sources[i]`` to ``targets[i]``."""
        if not sources:
            return
        source, target = to_device([sources, targets], torch.int64, self.device).unbind()
        self._kv.index_copy_(2, target, self._kv.index_select(2, source))

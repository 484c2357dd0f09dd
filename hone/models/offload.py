"""Keep activations in host memory between forward and backward pass, copied on a stream of their own.

::

    forward   compute   layer 0 | layer 1 | layer 2 | ...          a saved tensor stays on the device until its copy is
              copies              0 to host | 1 to host | ...       done; at most `in_flight` bytes wait for that
    backward  compute            ... | layer 2 | layer 1 | layer 0
              copies       ... 2 to device | 1 to device | 0 ...    the copy of the next tensor runs during this one's layer

The host waits for no copy: events order the two streams. Device memory is allocated and freed in the order of the computing stream,
which waits for a copy before it gives the copied memory back. One stream makes all copies in order, so a host buffer is reused as soon
as its last copy is enqueued. torch's own ``save_on_cpu`` copies on the computing stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hone.config.limits import OFFLOAD_IN_FLIGHT_BYTES

SMALLEST = 1 << 16
"""Size in numbers of the smallest tensor that is moved."""


class ActivationOffload:
    """Moves what autograd saves to host memory, and back one layer ahead of the backward pass.

    Copies under way hold at most ``in_flight`` bytes of device memory in each direction.
    """

    def __init__(self, device: torch.device, in_flight: int = OFFLOAD_IN_FLIGHT_BYTES) -> None:
        self.device, self.in_flight = device, in_flight
        self.buffers = _Buffers()
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Move tensors that autograd saves within the block. Parameters and small tensors stay on the device."""
        saved = _SavedTensors(self)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, _bring_back):
            yield

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy on the stream of copies, after what the computing stream has been given; return the event after the copy."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the computing stream wait for a copy; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(event)


class _Buffers:
    """Pinned host memory in powers of two, as torch allocates it; used again in the order of the stream of copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        size = 1 << (size - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class _SavedTensors:
    """The moved tensors of one forward pass, in its order."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self._all: list[weakref.ref[_Saved]] = []
        self._leaving: deque[weakref.ref[_Saved]] = deque()
        self._leaving_bytes = 0
        self._by_memory: dict[Any, weakref.ref[_Saved]] = {}

    def keep(self, tensor: Tensor) -> Tensor | _Saved:
        """Begin the copy to the host. A tensor that is saved again while it is on the device is copied once."""
        if not _is_moved(tensor):
            return tensor
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
        known = self._by_memory[key]() if key in self._by_memory else None
        if known is not None and known.on_device is not None:
            return known
        saved = _Saved(self, len(self._all), tensor)
        reference = self._by_memory[key] = weakref.ref(saved)
        self._all.append(reference)
        self._leaving.append(reference)
        self._leaving_bytes += saved.size
        while len(self._leaving) > 1 and self._leaving_bytes > self.offload.in_flight:
            self._first_leaves()
        return saved

    def _first_leaves(self) -> None:
        saved = self._leaving.popleft()()
        if saved is None:  # its graph is gone: count the others again
            remaining = [other.size for other in (reference() for reference in self._leaving) if other is not None]
            self._leaving_bytes = sum(remaining)
            return
        saved.leave_device()
        self._leaving_bytes -= saved.size

    def fetch_before(self, index: int) -> None:
        """Begin the copies to the device of the tensors that the backward pass needs next, the latest first."""
        size = 0
        for number in range(index - 1, -1, -1):
            saved = self._all[number]()
            if saved is None:
                continue
            if size and size + saved.size > self.offload.in_flight:
                return
            size += saved.size
            saved.fetch()


class _Saved:
    """A tensor that autograd saved."""

    def __init__(self, tensors: _SavedTensors, index: int, tensor: Tensor) -> None:
        self._tensors, self._index, self._offload = tensors, index, tensors.offload
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._strides = torch.empty_like(
            tensor, device="meta"
        ).stride()  # without gaps, in the tensor's order of dimensions
        self.size = tensor.numel() * tensor.element_size()  # in bytes
        self._buffer = self._offload.buffers.take(self.size)
        self.on_device: Tensor | None = tensor  # the tensor, or None while only the host has it
        self._arriving = False
        self._copied: torch.cuda.Event | None = self._offload.copy(self._on_host(), tensor)

    def _on_host(self) -> Tensor:
        return self._buffer[: self.size].view(self._dtype).as_strided(self._shape, self._strides)

    def leave_device(self) -> None:
        """Give the device memory back after the copy out of it, or into it."""
        if self._copied is not None:
            self._offload.wait(self._copied)
        self.on_device = self._copied = None

    def fetch(self) -> None:
        """Begin the copy to the device, unless the tensor is there."""
        if self.on_device is not None:
            return
        target = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._offload.device)
        self._copied, self._arriving = self._offload.copy(target, self._on_host()), True
        self.on_device = target

    def bring_back(self) -> Tensor:
        """Return the tensor on the device, and begin the copies of those that are needed next."""
        self.fetch()
        if self._arriving and self._copied is not None:
            self._offload.wait(self._copied)
            self._copied = None
        self._tensors.fetch_before(self._index)
        assert self.on_device is not None
        return self.on_device

    def __del__(self) -> None:
        self.leave_device()
        self._offload.buffers.give_back(self._buffer)


def _is_moved(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return plain and not isinstance(base, nn.Parameter) and tensor.numel() >= SMALLEST and tensor.device.type != "cpu"


def _bring_back(kept: Tensor | _Saved) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.bring_back()

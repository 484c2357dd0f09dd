"""Small transfers between host and device that do not make the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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

"""CUDA IPC of the simulated GPU: two processes map the same memory of the host.

As on CUDA, the process that shares memory cannot map it itself, and memory of expandable segments is not shared.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from support.simulated_cuda.tensors import SimulatedTensor
from torch import Tensor

REFUSE_VARIABLE = "HONE_TEST_REFUSE_CUDA_IPC"
"""Environment variable of a process that cannot map memory of others, as in a container of its own."""
MAPPED: list[int] = []
"""Sizes of the buffers that this process has mapped, in bytes."""
_COUNTER = b"/simulated-counter"


class SimulatedStorage:
    """The storage of a tensor on the simulated GPU, with the methods that torch has for CUDA IPC; all others are the host's."""

    def __init__(self, memory: Tensor, expandable: bool = False) -> None:
        self.memory, self._expandable = memory, expandable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory.untyped_storage(), name)

    def _share_cuda_(self) -> tuple[Any, ...]:
        """Move the memory to where others can map it, and return the same eight values as torch."""
        if self._expandable:
            raise RuntimeError("memory of an expandable segment is not shared here")
        storage = self.memory.untyped_storage()
        file, size = storage._share_fd_cpu_()
        return 0, f"{os.getpid()} {os.dup(file)}".encode(), size, 0, _COUNTER, 7, b"", False


def segments_expand() -> bool:
    """Return whether memory that is allocated now is in an expandable segment."""
    settings = torch._C._accelerator_getAllocatorSettings().split(",")
    named = [setting for setting in settings if setting.startswith("expandable_segments")]
    return bool(named) and named[-1].endswith("True")


def _new_shared_cuda(
    device: int, handle: bytes, size: int, offset: int, counter: bytes, counter_offset: int, event: bytes, waits: bool
) -> SimulatedStorage:
    """Map memory of another process, as ``torch.UntypedStorage._new_shared_cuda`` does."""
    process, file = map(int, handle.split())
    if process == os.getpid() or os.environ.get(REFUSE_VARIABLE):
        raise RuntimeError("CUDA error: invalid resource handle")
    assert (device, offset, counter, counter_offset, waits) == (0, 0, _COUNTER, 7, False)
    MAPPED.append(size)
    path = Path(f"/proc/{process}/fd/{file}")
    return SimulatedStorage(torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))


def _storage(tensor: SimulatedTensor) -> SimulatedStorage:
    return SimulatedStorage(tensor.memory, tensor.expandable)


def _set(target: Tensor, source: Any) -> Tensor:
    assert isinstance(source, SimulatedStorage) and target.dtype == torch.uint8
    return SimulatedTensor(source.memory)


def _release(counter: bytes, counter_offset: int) -> None:
    assert (counter, counter_offset) == (_COUNTER, 7)


def turn_on() -> None:
    """Let processes share memory of the simulated GPU."""
    storage: Any = torch.UntypedStorage
    storage._new_shared_cuda, storage._release_ipc_counter_cuda = staticmethod(_new_shared_cuda), staticmethod(_release)
    simulated: Any = SimulatedTensor
    simulated.untyped_storage, simulated.set_ = _storage, _set

"""The device of a run, and the dtype that it computes in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from hone.config.dtypes import resolve_dtype


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype of autocast where it is enabled for the device of ``states``, and their own elsewhere."""
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype


def run_device(choice: str) -> torch.device:
    """Return the device that a value of ``trainer.device`` means in this process; ``auto`` is a GPU where there is one."""
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU with instructions for bfloat16 (on NVIDIA, compute capability 8.0 or higher)."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def dtype_on(device: torch.device, dtype: str) -> str:
    """Return the name of the compute dtype that a ``dtype`` key means on a device."""
    return resolve_dtype(dtype, bfloat16=computes_bfloat16(device))


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which a user configures torch's allocator."""


def use_expandable_segments(device: torch.device) -> None:
    """Let CUDA's memory segments grow, so that micro-batches of ever new sizes leave no holes; a user's own setting stays.

    It is set in this process only: engines in processes of their own, such as vLLM with its sleep mode, choose for themselves.
    """
    global _set_here
    if device.type == "cuda" and not _set_by_user():
        _set_here = "expandable_segments:True"
        torch._C._accelerator_setAllocatorSettings(_set_here)


_set_here = ""
"""What :func:`use_expandable_segments` has set; torch 2.11 cannot be asked for its settings."""


def _set_by_user() -> str:
    return next((value for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))), "")


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms in the block, if ``wanted``: sums in a fixed order, or an error that names the operation.

    Only the backward pass needs them: forward passes of Hone add nothing with atomics, and sampling uses operations that have no
    deterministic form on CUDA.
    """
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted or before, warn_only=warns and not wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextlib.contextmanager
def ordinary_segments() -> Iterator[None]:
    """Allocate in the block from segments of a fixed size, which other processes can map (CUDA IPC), also where segments expand."""
    settings = _set_by_user() or _set_here
    if "expandable_segments" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)

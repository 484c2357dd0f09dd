"""Triton programs and their launches; importing a module here needs Triton.

Programs compute in float32. Sums over all rows (gradients of norm weights) are partial sums of a fixed number of programs, which
torch adds up, so they are the same in every run on one kind of GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

PROGRAMS_A_PROCESSOR = 4
_PROGRAMS_ELSEWHERE = 3
"""Programs that add up rows where there is no GPU, as in Triton's interpreter."""


def summing_programs(device: torch.device, rows: int) -> int:
    """Return the number of programs that share ``rows`` and keep a partial sum each."""
    if device.type != "cuda":
        return min(rows, _PROGRAMS_ELSEWHERE)
    return min(rows, PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


def launched_on_cuda(operator: Any, module: str, function: str) -> None:
    """Let CUDA compute a custom operator by a function of a module here, which is imported at the first call."""

    @operator.register_kernel("cuda")
    def launch(*inputs: Any) -> Any:
        launched = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        with torch.cuda.device(next(value.device for value in inputs if isinstance(value, Tensor))):
            return launched(*inputs)

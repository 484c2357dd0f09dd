"""Triton programs and their launches; importing a module here needs Triton.

Programs compute in float32. Sums over all rows (gradients of norm weights) are partial sums of a fixed number of programs, which
torch adds up, so they are the same in every run on one kind of GPU.
"""

from __future__ import annotations

import torch

PROGRAMS_A_PROCESSOR = 4
_PROGRAMS_ELSEWHERE = 3
"""Programs that add up rows where there is no GPU, as in Triton's interpreter."""


def summing_programs(device: torch.device, rows: int) -> int:
    """Return the number of programs that share ``rows`` and keep a partial sum each."""
    if device.type != "cuda":
        return min(rows, _PROGRAMS_ELSEWHERE)
    return min(rows, PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)

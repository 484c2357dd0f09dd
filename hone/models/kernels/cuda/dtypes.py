"""The dtype that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """Return float32 values, or float64 where they are that already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))

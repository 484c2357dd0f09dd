"""The dtype that an operator computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype of autocast where it is enabled for the device of ``states``, and their own elsewhere."""
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype

"""Sums and means over the positions that a mask selects. Values outside the mask may be NaN."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in float32 or better, so that sums and exponentials of bfloat16 keep their precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def where_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where ``mask`` is 1 and 0 elsewhere; unlike multiplication it also removes NaN and infinity."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the mask, along ``dim`` or over everything; 0 for an empty mask."""
    selected = where_mask(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the mask, along ``dim`` or over everything; 0 for an empty mask."""
    count = (mask.sum() if dim is None else mask.sum(dim)).to(values.dtype)
    return masked_sum(values, mask, dim) / count.clamp(min=1)

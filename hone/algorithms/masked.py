"""Sums, means and variances over the positions that a mask selects. Values outside the mask may be NaN."""

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


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Return the variance over the mask, divided by n - 1 (``unbiased``) or n; 0 for fewer than two values."""
    squares = masked_sum((where_mask(values, mask) - masked_mean(values, mask)).square(), mask)
    count = mask.sum().to(values.dtype)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale to unit variance and, with ``shift_mean``, to zero mean over the mask; 0 outside it.

    A single selected value becomes 0 (its own mean), and so do equal values.
    """
    mean = masked_mean(values, mask)
    whitened = (where_mask(values, mask) - mean) * torch.rsqrt(masked_var(values, mask) + epsilon)
    return where_mask(whitened if shift_mean else whitened + mean, mask)

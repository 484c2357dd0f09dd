"""Sums, means and spreads over the positions that a mask selects. What stands outside the mask may be NaN."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """``values`` in float32 or better, so that sums and exponentials of bfloat16 keep their digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def where_mask(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is 1 and 0 elsewhere; unlike a product it also silences NaN and infinity."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the mask, along ``dim`` or over everything. An empty mask gives 0."""
    selected = where_mask(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the mask, along ``dim`` or over everything. An empty mask gives 0."""
    count = (mask.sum() if dim is None else mask.sum(dim)).to(values.dtype)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance over the whole mask, divided by n - 1 (``unbiased``) or n. Fewer than two values have no spread: 0."""
    squares = masked_sum((where_mask(values, mask) - masked_mean(values, mask)).square(), mask)
    count = mask.sum().to(values.dtype)
    return squares / (count - 1 if unbiased else count).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Scale to unit variance and, with ``shift_mean``, to zero mean over the mask; 0 outside it.

    A single selected value becomes 0 (its own mean), values without spread become 0 as well.
    """
    mean = masked_mean(values, mask)
    whitened = (where_mask(values, mask) - mean) * torch.rsqrt(masked_var(values, mask) + epsilon)
    return where_mask(whitened if shift_mean else whitened + mean, mask)

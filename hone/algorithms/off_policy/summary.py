"""Statistics of the values that a mask selected, as a flat, possibly empty tensor; all are 0 if it is empty."""

from __future__ import annotations

import math

from torch import Tensor


def mean(values: Tensor) -> Tensor:
    """Return the mean; for a bool tensor the share of true values."""
    return values.sum() / max(values.numel(), 1)


def deviation(values: Tensor) -> Tensor:
    """Return the standard deviation, divided by n - 1; 0 for a single value."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def smallest(values: Tensor) -> Tensor:
    return values.min() if values.numel() else values.new_zeros(())


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the nearest-rank quantile, by selection because ``torch.quantile`` refuses more than 16 million values."""
    count = values.numel()
    return values.kthvalue(max(1, math.ceil(q * count))).values if count else values.new_zeros(())


def extremes_and_moments(values: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return extremes of ``values``, and mean and standard deviation of ``weights`` (default: of the values)."""
    weights = values if weights is None else weights
    return {"mean": mean(weights), "std": deviation(weights), "max": largest(values), "min": smallest(values)}


def lost(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the share of the tokens of ``before [B, T]`` missing in ``after``, and of the sequences that lost one."""
    before = before.bool()
    gone = before & ~after
    return {
        "masked_fraction": gone.sum() / before.sum().clamp(min=1),
        "seq_masked_fraction": gone.any(-1).sum() / before.any(-1).sum().clamp(min=1),
    }

"""Statistics of the values that a mask selected, as a flat and possibly empty tensor; all are 0 when it is empty."""

from __future__ import annotations

import math

from torch import Tensor


def mean(values: Tensor) -> Tensor:
    """Mean; of a bool tensor the share that is true."""
    return values.sum() / max(values.numel(), 1)


def deviation(values: Tensor) -> Tensor:
    """Standard deviation, divided by n - 1; a single value has none."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def largest(values: Tensor) -> Tensor:
    """Maximum."""
    return values.max() if values.numel() else values.new_zeros(())


def smallest(values: Tensor) -> Tensor:
    """Minimum."""
    return values.min() if values.numel() else values.new_zeros(())


def quantile(values: Tensor, q: float) -> Tensor:
    """Nearest-rank quantile; by selection, because ``torch.quantile`` refuses more than 16 million values."""
    count = values.numel()
    return values.kthvalue(max(1, math.ceil(q * count))).values if count else values.new_zeros(())


def spread(values: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Extremes of ``values``; mean and standard deviation of ``weights``, or of the values without them."""
    weights = values if weights is None else weights
    return {"mean": mean(weights), "std": deviation(weights), "max": largest(values), "min": smallest(values)}


def lost(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Share of the tokens of ``before [B, T]`` that ``after`` does not have, and share of the sequences that lost one."""
    before = before.bool()
    gone = before & ~after
    return {
        "masked_fraction": gone.sum() / before.sum().clamp(min=1),
        "seq_masked_fraction": gone.any(-1).sum() / before.any(-1).sum().clamp(min=1),
    }

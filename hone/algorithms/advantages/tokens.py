"""From a number a row to numbers a token, and scaling over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 64
"""Rows that are worked on at a time where float64 copies are made: they then stay in the processor's cache."""


def row_blocks(size: int) -> Iterator[slice]:
    """Slices of :data:`ROWS` rows that cover ``size`` rows."""
    return (slice(start, start + ROWS) for start in range(0, size, ROWS))


def sequence_scores(token_level_rewards: Tensor) -> Tensor:
    """The sum of each row of rewards that are 0 outside the mask, ``[B]`` float64.

    float64, so that responses of equal reward have equal scores wherever in the row the parts of it stand.
    """
    blocks = [token_level_rewards[rows].double().sum(dim=-1) for rows in row_blocks(len(token_level_rewards))]
    return torch.cat(blocks)


def token_counts(response_mask: Tensor) -> Tensor:
    """Selected tokens of each row, ``[B]`` int64 (in blocks: the sum of a boolean tensor makes an int64 copy of it)."""
    return torch.cat([response_mask[rows].sum(dim=-1) for rows in row_blocks(len(response_mask))])


def spread(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Give every selected token the number of its row, ``[B]`` to ``[B, T]``; 0 outside the mask."""
    return response_mask * values.to(dtype)[:, None]


def spread_twice(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As :func:`spread`, as advantages and as returns (two tensors)."""
    advantages = spread(values, response_mask, dtype)
    return advantages, advantages.clone()


def whiten_(values: Tensor, response_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale ``values [B, T]``, which are 0 outside the mask, to mean 0 and variance 1 over it, in place.

    The variance divides by n - 1. A single selected value, and values without spread, become 0: the mean is taken in
    float64, or its rounding, divided by sqrt(epsilon), would look like an advantage.
    """
    count = token_counts(response_mask).sum().double().clamp(min=1)
    mean = sequence_scores(values).sum() / count
    values.sub_(mean.to(values.dtype)).mul_(response_mask)
    squares = torch.linalg.vector_norm(values, dim=-1).double().square().sum()
    return values.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon).to(values.dtype))

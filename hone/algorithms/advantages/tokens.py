"""Row values to token values, and scaling over the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 64
"""Number of rows per block where float64 copies are made, so that they stay in the processor's cache."""


def row_blocks(size: int) -> Iterator[slice]:
    """Yield slices of :data:`ROWS` rows that cover ``size`` rows."""
    return (slice(start, start + ROWS) for start in range(0, size, ROWS))


def sequence_scores(token_level_rewards: Tensor) -> Tensor:
    """Return the sum of each row of rewards that are 0 outside the mask, ``[B]`` float64.

    In float64, responses of equal reward have equal scores wherever in the row the rewards are.
    """
    blocks = [token_level_rewards[rows].double().sum(dim=-1) for rows in row_blocks(len(token_level_rewards))]
    return torch.cat(blocks)


def token_counts(response_mask: Tensor) -> Tensor:
    """Return the number of selected tokens of each row, ``[B]`` int64 (in blocks: the sum of a boolean tensor copies it to int64)."""
    return torch.cat([response_mask[rows].sum(dim=-1) for rows in row_blocks(len(response_mask))])


def broadcast(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the value of each row to its selected tokens, ``[B]`` to ``[B, T]``; 0 outside the mask."""
    return response_mask * values.to(dtype)[:, None]


def broadcast_twice(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`broadcast` twice, as advantages and as returns (two tensors)."""
    advantages = broadcast(values, response_mask, dtype)
    return advantages, advantages.clone()


def whiten_(values: Tensor, response_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale ``values [B, T]``, which are 0 outside the mask, to mean 0 and variance 1 over it, in place.

    The variance divides by n - 1. A single selected value, and equal values, become 0: the mean is computed in
    float64, because its rounding, divided by sqrt(epsilon), would otherwise look like an advantage.
    """
    count = token_counts(response_mask).sum().double().clamp(min=1)
    mean = sequence_scores(values).sum() / count
    values.sub_(mean.to(values.dtype)).mul_(response_mask)
    squares = torch.linalg.vector_norm(values, dim=-1).double().square().sum()
    return values.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon).to(values.dtype))

"""Sums of log-probs over spans of tokens, to compare models with different tokenizers."""

from __future__ import annotations

import torch
from torch import Tensor


def span_sums(values: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the sum of its span, and the number of tokens in it; differentiable.

    >>> sums, sizes = span_sums(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 0, 1]]))
    >>> sums.tolist(), sizes.tolist()
    ([[3.0, 3.0, 4.0]], [[2.0, 2.0, 1.0]])

    Args:
        values: ``[B, T]``.
        spans: ``[B, T]`` int64, the span of each token, below ``T``; -1 outside of the response, where the result is the value itself.
    """
    inside = spans >= 0
    index = spans.clamp(min=0)
    sums = torch.zeros_like(values).scatter_add(-1, index, torch.where(inside, values, 0.0))
    sizes = torch.zeros_like(values).scatter_add(-1, index, inside.to(values))
    return torch.where(inside, sums.gather(-1, index), values), torch.where(inside, sizes.gather(-1, index), 1.0)

"""From a number a row to numbers a token, and back."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The sum of each row's rewards over its selected tokens, ``[B]`` float64.

    float64, so that responses of equal reward have equal scores wherever in the row the parts of it stand.
    """
    blocks = zip(token_level_rewards.split(ROWS), response_mask.split(ROWS), strict=True)
    return torch.cat([torch.where(mask.bool(), rewards.double(), 0.0).sum(dim=-1) for rewards, mask in blocks])


def spread(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give every selected token the number of its row: advantages ``[B, T]``, and a copy as returns."""
    advantages = torch.where(
        response_mask, values.to(dtype)[:, None], torch.zeros((), dtype=dtype, device=values.device)
    )
    return advantages, advantages.clone()

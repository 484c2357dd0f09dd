"""Generalised advantage estimation, the estimator of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Result, register_estimator
from hone.algorithms.masked import masked_whiten, where_mask


@register_estimator(
    "gae",
    needs=["values"],
    formula="A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), whitened over the batch; returns = A + V",
    paper="Schulman et al. 2016, arXiv:1506.02438, eq. 16",
)
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Result:
    """Generalised advantage estimation over the selected tokens; the state after the last one has value 0.

    Advantages are whitened over all selected tokens given; returns are taken before whitening.
    """
    mask, rewards = response_mask, token_level_rewards
    # time runs along dim 0: each step of the two backward passes then reads one contiguous row
    keep = mask.t().contiguous()
    decay = torch.ones_like(keep, dtype=values.dtype).masked_fill_(keep, gamma * lam)
    value_rows = values.t().contiguous()
    next_values, following = torch.empty_like(value_rows), value_rows.new_zeros(len(rewards))
    for t in range(len(value_rows) - 1, -1, -1):
        next_values[t] = following
        following = torch.where(keep[t], value_rows[t], following)
    deltas = where_mask(rewards.t() + gamma * next_values - value_rows, keep)
    running = deltas.new_zeros(len(rewards))
    for t in range(len(deltas) - 1, -1, -1):
        # a skipped token has delta 0 and decay 1: what comes after it passes through unchanged
        running = deltas[t].addcmul_(decay[t], running)
    raw = where_mask(deltas.t(), mask)
    return masked_whiten(raw, mask), where_mask(raw + values, mask)

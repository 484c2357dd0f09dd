"""Generalised advantage estimation, the estimator of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Result, register_estimator
from hone.algorithms.advantages.scan import packings, suffix_sums
from hone.algorithms.advantages.tokens import whiten_


@register_estimator(
    "gae",
    formula="A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), whitened over the batch; returns = A + V",
    paper="Schulman et al. 2016, arXiv:1506.02438, eq. 16",
)
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Result:
    """Compute generalised advantage estimation over the selected tokens; the state after the last one has value 0.

    Advantages are whitened over all selected tokens; returns are computed before whitening.
    """
    advantages = torch.empty_like(token_level_rewards)
    for rows, packing in packings(response_mask):
        now = packing.pack(values[rows])
        delta = packing.pack(token_level_rewards[rows]) - now
        delta[:, :-1] += gamma * now[:, 1:]
        packing.unpack_into(advantages[rows], suffix_sums(delta, gamma * lam))
    returns = advantages + values
    return whiten_(advantages, response_mask), returns

"""PRIME's implicit process reward: a language model trained on outcomes gives a reward for each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.algorithms.masked import masked_mean, masked_sum, where_mask
from hone.errors import ConfigError


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, beta: float = 0.05) -> Tensor:
    """Return token rewards ``beta (log p - log p_ref)``, 0 outside the mask.

    Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 3, after Yuan et al. 2024, arXiv:2412.01981, proposition 3.1. Their sum
    over a response is the outcome reward that the model was trained on, and a partial sum is the value of a prefix.

    Gradients flow through ``log_probs [B, T]`` only. ``beta`` is above 0. Values outside the mask, NaN included, are ignored.
    """
    if beta <= 0:
        raise ConfigError(f"beta={beta} must be above 0", why="rewards would vanish or change sign", fix="beta=0.05")
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    gap = where_mask(log_probs, response_mask).to(dtype) - where_mask(ref_log_probs.detach(), response_mask).to(dtype)
    return beta * gap


def implicit_reward_loss(
    token_rewards: Tensor,  # result of :func:`implicit_rewards`, ``[B, T]``, with gradient
    labels: Tensor,  # ``[B]``, 1 for a right outcome, 0 for a wrong one (or a value in between)
    response_mask: Tensor,  # ``[B, T]``; rows without a token are ignored
    *,
    # responses of the whole mini-batch over all ranks, so that micro-batches add up
    global_batch_size: int | Tensor | None = None,
    dp_size: int = 1,  # data-parallel ranks whose gradients are averaged
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy between outcome labels and the sigmoid of summed token rewards, mean over responses.

    Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 5.

    Metrics have no gradient: ``implicit_reward/accuracy`` (sign of the sum against label above one half) and
    ``implicit_reward/mean`` (mean of the sums).

    Raises:
        ValueError: ``dp_size > 1`` without ``global_batch_size``.
    """
    if dp_size > 1 and global_batch_size is None:
        raise ValueError(f"with dp_size={dp_size} the loss needs global_batch_size over all ranks")
    sums = masked_sum(token_rewards, response_mask, dim=-1)
    target, present = labels.to(sums), response_mask.bool().any(-1)
    loss = -target * logsigmoid(sums) - (1 - target) * logsigmoid(-sums)
    responses = present.sum() if global_batch_size is None else global_batch_size
    responses = responses.clamp(min=1) if isinstance(responses, Tensor) else max(responses, 1)
    with torch.no_grad():
        hit = ((sums > 0) == (target > 0.5)).to(sums.dtype)
        metrics = {
            "implicit_reward/accuracy": masked_mean(hit, present),
            "implicit_reward/mean": masked_mean(sums.detach(), present),
        }
    return masked_sum(loss, present) / responses * dp_size, metrics

"""Implicit process rewards: a language model whose log-ratio to a reference is the reward of each token (PRIME)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hone.algorithms.masked import where_mask
from hone.errors import ConfigError


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, beta: float) -> Tensor:
    """Return ``beta (log p - log p_ref)`` of each token, of any shape.

    Yuan et al. 2024, arXiv:2412.01981, eq. 3: their sum over a response is the log-odds that it is right, if the model was trained with
    :func:`outcome_loss`.
    """
    return beta * (log_probs - ref_log_probs)


def outcome_loss(
    log_probs: Tensor,  # of the response tokens under the trained model, ``[B, T]``
    ref_log_probs: Tensor,  # under the reference, ``[B, T]``
    response_mask: Tensor,  # ``[B, T]``
    outcomes: Tensor,  # ``[B]``, from 0 (wrong) to 1 (right)
    *,
    beta: float,
    global_batch_size: int | None = None,  # responses of the whole mini-batch; None means those here
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy of the outcomes, whose log-odds are the summed :func:`implicit_rewards`, and metrics.

    Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 6. Metrics have no gradient and are means over the responses with tokens:
    ``critic/prm_loss`` and ``critic/prm_accuracy`` (log-odds on the side of the outcome; 0 counts half).

    Raises:
        ConfigError: an outcome is not from 0 to 1.
    """
    low, high = (float(value) for value in (outcomes.min(), outcomes.max()))
    if not (low >= -1e-4 and high <= 1 + 1e-4):
        raise ConfigError(
            f"rewards are from {low:.4g} to {high:.4g}, but a process reward model learns from 0 (wrong) to 1 (right)",
            why="they are the probabilities that it predicts",
            fix="a reward from 0 to 1, algorithm.use_kl_in_reward=false, or algorithm.adv_estimator=rloo",
            where="algorithm.adv_estimator",
        )
    mask = response_mask.bool()
    rewards = where_mask(implicit_rewards(log_probs, ref_log_probs, beta), mask)
    logits, present = rewards.sum(-1), mask.any(-1)
    targets = outcomes.to(logits)
    losses = torch.where(present, binary_cross_entropy_with_logits(logits, targets, reduction="none"), 0.0)
    count = present.sum().clamp(min=1)
    with torch.no_grad():
        side = torch.sign(logits) * torch.sign(targets - 0.5)
        right = torch.where(present, (side + 1) / 2, 0.0).sum() / count
        metrics = {"critic/prm_loss": losses.detach().sum() / count, "critic/prm_accuracy": right}
    return losses.sum() / (count if global_batch_size is None else max(global_batch_size, 1)), metrics

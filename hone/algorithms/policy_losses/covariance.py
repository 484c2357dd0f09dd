"""Losses against entropy collapse: they restrict tokens whose log-prob and advantage vary together.

Such tokens, likely and good or unlikely and bad, reduce the policy's entropy (Cui et al., theorem 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.masked import where_mask
from hone.algorithms.policy_losses.base import (
    Prepared,
    TokenLoss,
    clipped_surrogate,
    register_policy_loss,
    require,
    token_ratio,
)

_MULTIPLIER = (
    -7046029254386353131
)  # odd, 2^64 / golden ratio; multiplying moves bits upwards, the shift moves them down


def exact_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask, summed in float64 and rounded to float32.

    Rounding hides the order of the sum, so that a comparison with this mean is the same for any order.
    """
    return (where_mask(values, mask).sum(dtype=torch.float64) / mask.sum().clamp(min=1)).float()


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's contribution ``(log pi - mean)(A - mean)`` to their covariance, float64 ``[B, T]``."""
    centred, push = (x.to(torch.float64, copy=True).sub_(exact_mean(x, mask)) for x in (log_probs, advantages))
    return centred.mul_(push)


def draw(candidates: Tensor, count: int, *columns: Tensor) -> Tensor:
    """Draw ``count`` of the tokens that ``candidates`` (bool) marks, pseudo-randomly (bool); all, if there are no more.

    A token is drawn by a hash of its entries in ``columns``, not by its position: the draw is reproducible and the same for
    any order of rows. Tokens equal in every column are drawn together.
    """
    places = candidates.flatten().nonzero()[:, 0]
    if count <= 0:
        return torch.zeros_like(candidates)
    if len(places) <= count:
        return candidates
    hashes = _hash([column.flatten()[places] for column in columns])
    drawn = torch.zeros(candidates.numel(), dtype=torch.bool, device=candidates.device)
    drawn[places] = hashes <= hashes.kthvalue(count).values
    return drawn.view(candidates.shape)


def draw_largest(score: Tensor, candidates: Tensor, count: int, *columns: Tensor) -> Tensor:
    """Return the ``count`` candidates with the largest score (bool); :func:`draw` decides among equal scores."""
    count = min(count, int(candidates.sum()))
    if count == 0:
        return torch.zeros_like(candidates)
    last = score.masked_fill(~candidates, -torch.inf).flatten().topk(count).values[-1]
    above = candidates & (score > last)
    return above | draw(candidates & (score == last), count - int(above.sum()), *columns)


def share_of(mask: Tensor, share: float) -> int:
    """Return ``share`` of the number of selected tokens, at least 1."""
    return max(int(share * int(mask.sum())), 1)


def _hash(columns: list[Tensor]) -> Tensor:
    """Return 63 well mixed bits of each position's integers and float32 values; -0 counts as 0."""
    mixed = torch.zeros_like(columns[0], dtype=torch.int64)
    for column in columns:
        bits = (column.float() + 0.0).view(torch.int32) if column.is_floating_point() else column
        mixed = (mixed ^ bits.long()) * _MULTIPLIER
        mixed = mixed ^ (mixed >> 32)
    return (mixed * _MULTIPLIER) & 0x7FFFFFFFFFFFFFFF


PAPER = "Cui et al. 2025, arXiv:2505.22617"


def _require_share(name: str, share: float) -> None:
    require(
        0 < share <= 1,
        f"{name}={share} must be above 0 and at most 1",
        why="it is a share of the tokens of a mini-batch",
        fix=f"actor_rollout_ref.actor.policy_loss.{name}=0.0002",
    )


def covariance_clip(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    keys: Tensor | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> Prepared:
    """Return ``chosen`` (0 or 1): a random share of the tokens whose covariance is strictly between the bounds.

    Tokens that PPO clips already are not chosen. At least one token is chosen, if there is a candidate.
    """
    _require_share("clip_cov_ratio", clip_cov_ratio)
    require(
        clip_cov_lb < clip_cov_ub,
        f"clip_cov_lb={clip_cov_lb} is not below clip_cov_ub={clip_cov_ub}",
        why="no value is between them",
        fix="actor_rollout_ref.actor.policy_loss.clip_cov_lb=1.0 actor_rollout_ref.actor.policy_loss.clip_cov_ub=5.0",
    )
    moves = covariance(log_probs, advantages, response_mask)
    candidates = (moves > clip_cov_lb) & (moves < clip_cov_ub) & response_mask
    places = candidates.nonzero(as_tuple=True)
    ratio = token_ratio(old_log_probs[places], log_probs[places])
    _, clipped = clipped_surrogate(ratio, advantages[places], clip_ratio_low, clip_ratio_high)
    candidates[places] = ~clipped
    columns = (old_log_probs, log_probs, advantages) if keys is None else (keys,)
    chosen = draw(candidates, share_of(response_mask, clip_cov_ratio), *columns)
    return {"chosen": chosen.to(log_probs.dtype)}


@register_policy_loss(
    "clip_cov",
    formula="max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), 0 for a random clip_cov_ratio of the tokens with clip_cov_lb < (log pi - mean)(A - mean) < clip_cov_ub",
    paper=f"{PAPER} (Clip-Cov)",
    across_batch=covariance_clip,
)
def clip_cov(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    prepared: Prepared,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Apply PPO's clip, and remove the gradient of a few random tokens of high covariance."""
    ratio = token_ratio(old_log_probs, log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    chosen = prepared["chosen"] > 0
    return TokenLoss(torch.where(chosen, 0.0, loss), ratio, {"pg_clipfrac": clipped, "pg_cov_fraction": chosen})


def largest_covariances(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    keys: Tensor | None = None,
    kl_cov_ratio: float = 2e-4,
) -> Prepared:
    """Return ``chosen`` (0 or 1): the share of the tokens with the largest covariance, at least one."""
    _require_share("kl_cov_ratio", kl_cov_ratio)
    moves = covariance(log_probs, advantages, response_mask)
    count = share_of(response_mask, kl_cov_ratio)
    columns = (old_log_probs, log_probs, advantages) if keys is None else (keys,)
    chosen = draw_largest(moves, response_mask, count, *columns)
    return {"chosen": chosen.to(log_probs.dtype)}


@register_policy_loss(
    "kl_cov",
    formula="-A r, plus ppo_kl_coef |log r| for the kl_cov_ratio of the tokens with the largest (log pi - mean)(A - mean)",
    paper=f"{PAPER} (KL-Cov)",
    across_batch=largest_covariances,
)
def kl_cov(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    prepared: Prepared,
    ppo_kl_coef: float = 0.1,
) -> TokenLoss:
    """Use the unclipped surrogate, with a KL penalty on the few tokens of highest covariance.

    The penalty is the absolute log-ratio, which is 0 with gradient 0 on the first update of a batch.
    """
    require(
        ppo_kl_coef >= 0,
        f"ppo_kl_coef={ppo_kl_coef} must not be negative",
        why="the penalty would drive the policy away from the old one",
        fix="actor_rollout_ref.actor.policy_loss.ppo_kl_coef=0.1",
    )
    ratio = token_ratio(old_log_probs, log_probs)
    chosen = prepared["chosen"]
    loss = ppo_kl_coef * chosen * (log_probs - old_log_probs).abs() - advantages * ratio
    return TokenLoss(loss, ratio, {"pg_cov_fraction": chosen})

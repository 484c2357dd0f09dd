"""Rejection: tokens and sequences on which the two policies disagree too much are left out of the loss."""

from __future__ import annotations

import math

from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum, masked_var, where_mask
from hone.algorithms.off_policy.rules import RejectionRule
from hone.algorithms.off_policy.weights import LOG_RATIO_LIMIT, extreme


def rejection_statistic(log_ratio: Tensor, mask: Tensor, rule: RejectionRule) -> tuple[Tensor, Tensor]:
    """Distance of the two policies at each token ``[B, T]`` or over each sequence ``[B, 1]``, and which units count.

    With ``r`` the token's ratio, its log clamped to +-20: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r
    (Schulman 2020); ``token_*`` takes it as it is, ``seq_sum_*``, ``seq_mean_*`` and ``seq_max_*`` (the worst token)
    reduce it over the sequence.
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if rule.statistic == "k1":
        tokens = -log_ratio
    elif rule.statistic == "k2":
        tokens = 0.5 * log_ratio.square()
    else:
        tokens = log_ratio.expm1() - log_ratio
    if rule.reduction == "token":
        return tokens, mask.bool()
    units = mask.sum(-1, keepdim=True) > 0
    if rule.reduction == "seq_max":
        # k2 and k3 are never negative: the zeros outside the mask cannot win
        return where_mask(tokens, mask).amax(-1, keepdim=True) if mask.shape[-1] else tokens.new_zeros(
            units.shape
        ), units
    reduce = masked_sum if rule.reduction == "seq_sum" else masked_mean
    return reduce(tokens, mask, -1)[:, None], units


def reject(log_ratio: Tensor, mask: Tensor, rules: tuple[RejectionRule, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep what every rule keeps.

    Args:
        log_ratio: ``[B, T]``, 0 outside the mask.
        mask: ``[B, T]``.
        rules: each is applied to the whole of ``mask``.

    Returns:
        the tokens that stay (bool ``[B, T]``), and statistics of each rule and of all together.
    """
    kept, metrics = mask.bool(), {}
    for rule in rules:
        value, units = rejection_statistic(log_ratio, mask, rule)
        passes = (value >= rule.low) & (value <= rule.high)  # NaN does not
        kept = kept & passes
        prefix = f"rollout_corr/rollout_rs_{rule.option}"
        metrics |= {
            f"{prefix}_mean": masked_mean(value, units),
            f"{prefix}_std": masked_var(value, units).sqrt(),
            f"{prefix}_max": extreme(value, units, "max"),
            f"{prefix}_min": extreme(value, units, "min"),
            f"{prefix}_fraction_high": masked_mean((value > rule.high).float(), units),
            **_shares(prefix, mask, mask.bool() & passes),
        }
        if rule.low > -math.inf:
            metrics[f"{prefix}_fraction_low"] = masked_mean((value < rule.low).float(), units)
    if rules:
        metrics |= _shares("rollout_corr/rollout_rs", mask, kept)
    return kept, metrics


def veto(log_ratio: Tensor, mask: Tensor, threshold: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Drop every sequence in which one token's ratio is below ``threshold``: the trained policy would (almost) never
    have sampled it (Liu et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse).

    Returns:
        the tokens that stay (bool ``[B, T]``), and the shares of tokens below the threshold and of sequences dropped.
    """
    catastrophic = mask.bool() & ~(log_ratio >= math.log(threshold))
    dropped = catastrophic.any(-1)
    metrics = {
        "rollout_corr/rollout_is_catastrophic_token_fraction": masked_mean(catastrophic.float(), mask),
        "rollout_corr/rollout_is_veto_fraction": masked_mean(dropped.float(), mask.sum(-1) > 0),
    }
    return mask.bool() & ~dropped[:, None], metrics


def _shares(prefix: str, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Share of the tokens that were lost, and share of the sequences that lost at least one."""
    lost = before.bool() & ~after
    return {
        f"{prefix}_masked_fraction": masked_mean(lost.float(), before),
        f"{prefix}_seq_masked_fraction": masked_mean(lost.any(-1).float(), before.sum(-1) > 0),
    }

"""Rejection: exclude tokens and sequences from the loss on which the two policies disagree too much."""

from __future__ import annotations

import math

from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum, where_mask
from hone.algorithms.off_policy import summary
from hone.algorithms.off_policy.rules import RejectionRule
from hone.algorithms.off_policy.weights import LOG_RATIO_LIMIT


def rejection_statistic(log_ratio: Tensor, mask: Tensor, rule: RejectionRule) -> tuple[Tensor, Tensor]:
    """Return the distance of the policies per token ``[B, T]`` or sequence ``[B, 1]``, and which units count.

    With ``r`` the token's ratio, its log clamped to +-20: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r
    (Schulman 2020); ``token_*`` uses it unchanged, ``seq_sum_*``, ``seq_mean_*`` and ``seq_max_*`` (the worst token)
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
        # k2 and k3 are never negative: zeros outside the mask cannot be the maximum
        return where_mask(tokens, mask).amax(-1, keepdim=True) if mask.shape[-1] else tokens.new_zeros(
            units.shape
        ), units
    reduce = masked_sum if rule.reduction == "seq_sum" else masked_mean
    return reduce(tokens, mask, -1)[:, None], units


def reject(log_ratio: Tensor, mask: Tensor, rules: tuple[RejectionRule, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens that every rule keeps, bool ``[B, T]``, and statistics of each rule and of all together.

    Each rule is applied to the whole of ``mask``; the log-ratio is 0 outside it.
    """
    kept, metrics = mask.bool(), {}
    for rule in rules:
        value, units = rejection_statistic(log_ratio, mask, rule)
        passes = (value >= rule.low) & (value <= rule.high)  # NaN does not pass
        kept = kept & passes
        metrics |= _rule_metrics(rule, value[units], mask, mask.bool() & passes)
    if rules:
        metrics |= {f"rollout_corr/rollout_rs_{name}": value for name, value in summary.lost(mask, kept).items()}
    return kept, metrics


def veto(log_ratio: Tensor, mask: Tensor, threshold: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Drop every sequence with one token whose ratio is below ``threshold``; also return the shares of tokens and sequences.

    The trained policy would (almost) never have sampled it (Liu et al. 2025, "When Speed Kills Stability",
    https://richardli.xyz/rl-collapse).
    """
    catastrophic = mask.bool() & ~(log_ratio >= math.log(threshold))
    dropped = catastrophic.any(-1)
    metrics = {
        "rollout_corr/rollout_is_catastrophic_token_fraction": catastrophic.sum() / mask.sum().clamp(min=1),
        "rollout_corr/rollout_is_veto_fraction": dropped.sum() / (mask.sum(-1) > 0).sum().clamp(min=1),
    }
    return mask.bool() & ~dropped[:, None], metrics


def _rule_metrics(rule: RejectionRule, values: Tensor, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    metrics = summary.extremes_and_moments(values) | {
        "fraction_high": summary.mean(values > rule.high),
        **summary.lost(before, after),
    }
    if rule.low > -math.inf:
        metrics["fraction_low"] = summary.mean(values < rule.low)
    return {f"rollout_corr/rollout_rs_{rule.option}_{name}": value for name, value in metrics.items()}

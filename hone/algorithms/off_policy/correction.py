"""Rollout correction: importance weights, rejection, veto and diagnostics of one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.kl import binary_kl
from hone.algorithms.masked import masked_mean, masked_sum, where_mask, wide
from hone.algorithms.off_policy.rules import CorrectionRules, RejectionRule, Threshold, WeightRule


def mean(values: Tensor) -> Tensor:
    """Return the mean; for a bool tensor the share of true values."""
    return values.sum() / max(values.numel(), 1)


def deviation(values: Tensor) -> Tensor:
    """Return the standard deviation, divided by n - 1; 0 for a single value."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def smallest(values: Tensor) -> Tensor:
    return values.min() if values.numel() else values.new_zeros(())


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the nearest-rank quantile, by selection because ``torch.quantile`` refuses more than 16 million values."""
    count = values.numel()
    return values.kthvalue(max(1, math.ceil(q * count))).values if count else values.new_zeros(())


def extremes_and_moments(values: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return extremes of ``values``, and mean and standard deviation of ``weights`` (default: of the values)."""
    weights = values if weights is None else weights
    return {"mean": mean(weights), "std": deviation(weights), "max": largest(values), "min": smallest(values)}


def lost(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the share of the tokens of ``before [B, T]`` missing in ``after``, and of the sequences that lost one."""
    before = before.bool()
    gone = before & ~after
    return {
        "masked_fraction": gone.sum() / before.sum().clamp(min=1),
        "seq_masked_fraction": gone.any(-1).sum() / before.any(-1).sum().clamp(min=1),
    }


OUTSIDE = math.log(2)
"""A ratio is outside [0.5, 2] if its logarithm is larger than this in size."""
QUANTILES = {"q01": 0.01, "q50": 0.5, "q99": 0.99}


@torch.no_grad()
def off_policy_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Measure the gap between two policies on the sampled tokens.

    With ``d = old - rollout`` at a token and ``r = exp(d)`` (d clamped to +-20):

    ======================================  =======================================================================
    ``kl``, ``k3_kl``                       mean of -d and of r - 1 - d: KL(rollout || old) in nats per token
    ``chi2_token``, ``chi2_seq``            mean of r^2 - 1 over tokens, and of the squared ratio of whole sequences
                                            - 1: the variance of exact importance weights
    ``log_ratio_q01``, ``_q50``, ``_q99``   quantiles of d (nearest rank); ``log_ratio_abs_max`` the largest size of d
    ``ratio_outside``                       share of tokens with r outside [0.5, 2]
    ``training_log_ppl``, ``training_ppl``  mean over sequences of -mean(old) and of its exponential
    ``rollout_log_ppl``, ``rollout_ppl``    the same for the sampling policy
    ``log_ppl_diff``, ``_abs_diff``,        training - rollout log-perplexity of a sequence: its mean, mean size,
    ``_diff_max``, ``_diff_min``            and extremes
    ``ppl_ratio``                           mean over sequences of training / rollout perplexity
    ======================================  =======================================================================

    All keys start with ``rollout_corr/``. Sequences with an empty mask are not counted; an empty batch gives zeros. Values
    outside the mask may be NaN.
    """
    old, rollout = (wide(where_mask(x, response_mask)) for x in (old_log_probs, rollout_log_probs))
    rows = response_mask.sum(-1) > 0
    training, sampling = (-masked_mean(x, response_mask, -1)[rows] for x in (old, rollout))
    sequences = _limited(masked_sum(old - rollout, response_mask, -1)[rows])
    difference = training - sampling
    gap = (old - rollout)[response_mask.bool()]
    limited = _limited(gap)
    metrics = {
        "kl": -mean(gap),
        "k3_kl": mean(limited.expm1() - limited),
        "chi2_token": mean((2 * limited).expm1()),
        "chi2_seq": mean((2 * sequences).expm1()),
        "ratio_outside": mean((gap.abs() > OUTSIDE).to(gap.dtype)),
        "log_ratio_abs_max": largest(gap.abs()),
        **{f"log_ratio_{name}": quantile(gap, q) for name, q in QUANTILES.items()},
        "training_log_ppl": mean(training),
        "training_ppl": mean(training.exp()),
        "rollout_log_ppl": mean(sampling),
        "rollout_ppl": mean(sampling.exp()),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(difference.abs()),
        "log_ppl_diff_max": largest(difference),
        "log_ppl_diff_min": smallest(difference),
        "ppl_ratio": mean(_limited(difference).exp()),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


KPOP_MARGIN = 1e-6
"""Distance of probabilities from 0 and 1, where their KL may be infinite: it is at most 13.8 nats."""


def kpop(old: Tensor, rollout: Tensor) -> Tensor:
    """Return the larger of KL(old || rollout) and KL(rollout || old) of "this token, or any other" ``[B, T]``.

    A probability that is rounded to 0 or 1 counts as one at ``KPOP_MARGIN`` from there. Guo et al. 2026, "KPop"
    (https://ringtech.notion.site/kpop).
    """
    p, q = (x.clamp(math.log(KPOP_MARGIN), math.log1p(-KPOP_MARGIN)) for x in (old, rollout))
    return torch.maximum(binary_kl(p, q), binary_kl(q, p))


def rejection_statistic(old: Tensor, rollout: Tensor, mask: Tensor, rule: RejectionRule) -> tuple[Tensor, Tensor]:
    """Return the distance of the policies per token ``[B, T]`` or sequence ``[B, 1]``, and which units count.

    With ``r`` the token's ratio, its log clamped to +-20: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r
    (Schulman 2020); :func:`kpop` takes both log-probs. ``token_*`` uses it unchanged, ``seq_sum_*``, ``seq_mean_*``
    and ``seq_max_*`` (the worst token) reduce it over the sequence.
    """
    log_ratio = _limited(old - rollout)
    if rule.statistic == "kpop":
        tokens = kpop(old, rollout)
    elif rule.statistic == "k1":
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


def reject(
    old: Tensor, rollout: Tensor, mask: Tensor, rules: tuple[RejectionRule, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens that every rule keeps, bool ``[B, T]``, and statistics of each rule and of all together.

    Each rule is applied to the whole of ``mask``; log-probs are finite outside it.
    """
    kept, metrics = mask.bool(), {}
    for rule in rules:
        value, units = rejection_statistic(old, rollout, mask, rule)
        passes = (value >= rule.low) & (value <= rule.high)  # NaN does not pass
        kept = kept & passes
        metrics |= _rule_metrics(rule, value[units], mask, mask.bool() & passes)
    if rules:
        metrics |= {f"rollout_corr/rollout_rs_{name}": value for name, value in lost(mask, kept).items()}
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
    metrics = extremes_and_moments(values) | {
        "fraction_high": mean(values > rule.high),
        **lost(before, after),
    }
    if rule.low > -math.inf:
        metrics["fraction_low"] = mean(values < rule.low)
    return {f"rollout_corr/rollout_rs_{rule.option}_{name}": value for name, value in metrics.items()}


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before the exponential, which is then between 2e-9 and 5e8."""


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Return the ratio of the probabilities of a unit (a token or a sequence) under two policies.

    ==============  ========================================================  =======
    ``token``       exp(log_ratio)                                            [B, T]
    ``sequence``    exp(sum of log_ratio over the sequence)                   [B, 1]
    ``geometric``   exp(mean of log_ratio over the sequence)                  [B, 1]
    ==============  ========================================================  =======

    Also return which units count (1 or 0), in the same shape. ``log_ratio [B, T]`` is 0 outside the mask.
    """
    if level == "token":
        exponent, units = log_ratio, mask
    else:
        reduce = masked_sum if level == "sequence" else masked_mean
        exponent, units = reduce(log_ratio, mask, -1)[:, None], (mask.sum(-1, keepdim=True) > 0)
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), units


def bounded(ratio: Tensor, rule: WeightRule) -> Tensor:
    """Truncate above (TIS), or set ratios outside both bounds to 0 (MIS, IcePop).

    TIS: Ionides 2008, "Truncated importance sampling", J. Comput. Graph. Stat. 17(2). IcePop: Ling Team 2025,
    arXiv:2510.18855.
    """
    if rule.low is None:
        return ratio.clamp(max=rule.high)
    return torch.where((ratio >= rule.low) & (ratio <= rule.high), ratio, torch.zeros_like(ratio))


def normalized(weights: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Divide by the mean over the units that count, and return the mean too; a mean of 0 changes nothing."""
    mean = masked_mean(weights, units)
    factor = torch.where(mean > 1e-8, mean, torch.ones_like(mean))
    return weights / factor, factor


def weight_metrics(ratio: Tensor, weights: Tensor, units: Tensor, mask: Tensor, rule: WeightRule) -> dict[str, Tensor]:
    """Statistics of the weights, by unit (token or sequence) and by sequence.

    ``max``, ``min`` and the fractions are those of the ratio before it is bounded: afterwards they would only repeat
    the threshold. Mean, standard deviation and effective sample size (Kish: mean(w)^2 / mean(w^2), the share of the
    batch that unweighted samples of the same variance would need) are those of the final weights.
    """
    low = 1.0 / rule.high if rule.low is None else rule.low
    rows = mask.sum(-1) > 0
    row_ratio, row_weights = (masked_mean(x.expand_as(mask), mask, -1)[rows] for x in (ratio, weights))
    ratio, weights = ratio[units.bool()], weights[units.bool()]
    second = mean(weights.square())
    metrics = extremes_and_moments(ratio, weights) | {
        "ratio_fraction_high": mean(ratio > rule.high),
        "ratio_fraction_low": mean(ratio < low),
        "eff_sample_size": mean(weights).square() / second.clamp(min=torch.finfo(second.dtype).tiny),
        **{f"seq_{name}": value for name, value in extremes_and_moments(row_ratio, row_weights).items()},
        "seq_max_deviation": largest((row_ratio - 1.0).abs()),
        "seq_fraction_high": mean(row_ratio > rule.high),
        "seq_fraction_low": mean(row_ratio < low),
    }
    if rule.low is not None:
        metrics["oob_ratio"] = mean((ratio < low) | (ratio > rule.high))
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class Correction:
    """Result of the correction of a batch."""

    # importance weights ``[B, T]`` for the policy loss, 0 outside ``response_mask``; None without ``rollout_is``
    weights: Tensor | None
    # the mask without rejected tokens ``[B, T]``, in the dtype of the given mask. Normalise the loss by it.
    response_mask: Tensor
    metrics: dict[str, Tensor]  # ``rollout_corr/...``, scalars


@torch.no_grad()
def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: Threshold | None = None,
    rollout_token_veto_threshold: float | None = None,
) -> Correction:
    """Correct a batch that was sampled by another policy than the trained one.

    The sampling engine computes other probabilities than the trainer (precision, kernels, older weights). With
    ``r = exp(old - rollout)``, the policy gradient weighted by r of the sequence is unbiased, but its variance is too
    high; every option here reduces variance and adds bias. Liu et al. 2025, "When Speed Kills Stability"
    (https://richardli.xyz/rl-collapse); token-level truncation: Yao et al. 2025
    (https://fengyao.notion.site/off-policy-rl).

    *Decoupled* (three policies): call it once per batch with the log-probs that the trainer recomputed, pass ``weights``
    to the policy loss and replace the response mask. *Bypass* (two policies): the policy loss ``bypass_mode`` calls it
    with the current log-probs in place of the old ones.

    Other libraries differ in three points: here k1 bounds hold for the ratio r itself, not for 1 / r; batch normalisation
    makes the mean 1 over the tokens that remain after rejection; and ``token-mean`` divides by the remaining tokens, if
    it is given this mask's counts.

    Args:
        old_log_probs: log-probs of the trained policy, ``[B, T]``.
        rollout_log_probs: log-probs of the sampling policy, ``[B, T]``.
        response_mask: ``[B, T]``; values outside it may be NaN.
        rollout_is: level of the weights: ``token`` (biased, low variance), ``sequence`` (unbiased, high variance),
            ``geometric`` (the sequence's mean log-ratio, independent of length); None: no weights.
        rollout_is_threshold: a number truncates above (TIS); ``"lower_upper"`` or ``[lower, upper]`` sets weights
            outside to 0 and keeps the mask (IcePop; with lower 0.0 the one-sided MIS).
        rollout_is_batch_normalize: divide the weights by their mean (over tokens, or over sequences).
        rollout_rs: rejection criteria: names of ``REJECTION_OPTIONS``, a list or separated by commas; a token must pass
            all of them. ``seq_*`` options drop whole sequences, ``seq_max_*`` by their worst token.
        rollout_rs_threshold: one for all of them, or one each: ``k1`` takes ratio bounds ``"lower_upper"`` (a number u
            means 1/u to u), ``k2``, ``k3`` and ``kpop`` an upper bound.
        rollout_token_veto_threshold: drop a sequence if one token's ratio is below it (1e-4 is usual).
    """
    if not old_log_probs.shape == rollout_log_probs.shape == response_mask.shape:
        shapes = [tuple(x.shape) for x in (old_log_probs, rollout_log_probs, response_mask)]
        raise ValueError(f"old_log_probs, rollout_log_probs and response_mask have different shapes: {shapes}")
    rules = CorrectionRules.parse(
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
    )
    old, rollout = (wide(where_mask(x, response_mask)) for x in (old_log_probs, rollout_log_probs))
    log_ratio = old - rollout
    metrics = off_policy_metrics(old, rollout, response_mask)
    kept, rejected = reject(old, rollout, response_mask, rules.rejections)
    metrics |= rejected
    if rules.veto is not None:
        spared, vetoed = veto(log_ratio, response_mask, rules.veto)
        kept, metrics = kept & spared, metrics | vetoed
    weights = None
    if rules.weight is not None:
        ratio, units = importance_ratio(log_ratio, response_mask, rules.weight.level)
        weights = bounded(ratio, rules.weight)
        metrics |= weight_metrics(ratio, weights, units, response_mask, rules.weight)
        if rules.weight.normalize:
            left = kept if rules.weight.level == "token" else kept.any(-1, keepdim=True)
            weights, factor = normalized(weights, left)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
        weights = where_mask(weights.expand_as(kept), kept)
    return Correction(weights, where_mask(response_mask, kept), metrics)

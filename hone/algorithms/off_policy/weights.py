"""Importance weights: trained policy / sampling policy, for each token or sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum
from hone.algorithms.off_policy import summary
from hone.algorithms.off_policy.rules import WeightRule

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
    second = summary.mean(weights.square())
    metrics = summary.extremes_and_moments(ratio, weights) | {
        "ratio_fraction_high": summary.mean(ratio > rule.high),
        "ratio_fraction_low": summary.mean(ratio < low),
        "eff_sample_size": summary.mean(weights).square() / second.clamp(min=torch.finfo(second.dtype).tiny),
        **{f"seq_{name}": value for name, value in summary.extremes_and_moments(row_ratio, row_weights).items()},
        "seq_max_deviation": summary.largest((row_ratio - 1.0).abs()),
        "seq_fraction_high": summary.mean(row_ratio > rule.high),
        "seq_fraction_low": summary.mean(row_ratio < low),
    }
    if rule.low is not None:
        metrics["oob_ratio"] = summary.mean((ratio < low) | (ratio > rule.high))
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}

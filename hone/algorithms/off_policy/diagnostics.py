"""Distance between the sampling policy and the trained policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum, where_mask, wide
from hone.algorithms.off_policy import summary
from hone.algorithms.off_policy.weights import LOG_RATIO_LIMIT

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
        "kl": -summary.mean(gap),
        "k3_kl": summary.mean(limited.expm1() - limited),
        "chi2_token": summary.mean((2 * limited).expm1()),
        "chi2_seq": summary.mean((2 * sequences).expm1()),
        "ratio_outside": summary.mean((gap.abs() > OUTSIDE).to(gap.dtype)),
        "log_ratio_abs_max": summary.largest(gap.abs()),
        **{f"log_ratio_{name}": summary.quantile(gap, q) for name, q in QUANTILES.items()},
        "training_log_ppl": summary.mean(training),
        "training_ppl": summary.mean(training.exp()),
        "rollout_log_ppl": summary.mean(sampling),
        "rollout_ppl": summary.mean(sampling.exp()),
        "log_ppl_diff": summary.mean(difference),
        "log_ppl_abs_diff": summary.mean(difference.abs()),
        "log_ppl_diff_max": summary.largest(difference),
        "log_ppl_diff_min": summary.smallest(difference),
        "ppl_ratio": summary.mean(_limited(difference).exp()),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _limited(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

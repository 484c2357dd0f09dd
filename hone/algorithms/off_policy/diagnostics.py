"""How far the policy that sampled and the policy that is trained are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum, where_mask, wide
from hone.algorithms.off_policy.weights import LOG_RATIO_LIMIT, extreme

QUANTILES = {"q01": 0.01, "q50": 0.5, "q99": 0.99}


@torch.no_grad()
def off_policy_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Measure the gap between two policies on the sampled tokens.

    With ``d = old - rollout`` at a token and ``r = exp(d)`` (d clamped to +-20):

    ======================================  =======================================================================
    ``kl``, ``k3_kl``                       mean of -d and of r - 1 - d: KL(rollout || old) in nats a token
    ``chi2_token``, ``chi2_seq``            mean of r^2 - 1 over tokens, and of the squared ratio of whole sequences
                                            - 1: the variance that exact importance weights would have
    ``log_ratio_q01``, ``_q50``, ``_q99``   quantiles of d (nearest rank); ``log_ratio_abs_max`` the largest size of d
    ``training_log_ppl``, ``training_ppl``  mean over sequences of -mean(old) and of its exponential
    ``rollout_log_ppl``, ``rollout_ppl``    the same of the policy that sampled
    ``log_ppl_diff``, ``_abs_diff``,        training - rollout log-perplexity of a sequence: its mean, mean size,
    ``_diff_max``, ``_diff_min``            and extremes
    ``ppl_ratio``                           mean over sequences of training / rollout perplexity
    ======================================  =======================================================================

    All keys start with ``rollout_corr/``. Sequences with an empty mask are not counted; an empty batch gives zeros.

    Args:
        old_log_probs: of the trained policy, ``[B, T]``.
        rollout_log_probs: of the policy that sampled, ``[B, T]``.
        response_mask: ``[B, T]``; values outside it may be NaN.
    """
    old, rollout = (wide(where_mask(x, response_mask)) for x in (old_log_probs, rollout_log_probs))
    gap = old - rollout
    limited = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sequence = masked_sum(gap, response_mask, -1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rows = response_mask.sum(-1) > 0
    training_ppl, rollout_ppl = (-masked_mean(x, response_mask, -1) for x in (old, rollout))
    difference = training_ppl - rollout_ppl
    metrics = {
        "kl": masked_mean(-gap, response_mask),
        "k3_kl": masked_mean(limited.expm1() - limited, response_mask),
        "chi2_token": masked_mean((2 * limited).expm1(), response_mask),
        "chi2_seq": masked_mean((2 * sequence).expm1(), rows),
        "log_ratio_abs_max": extreme(gap.abs(), response_mask, "max"),
        **_quantiles(gap[response_mask.bool()]),
        "training_log_ppl": masked_mean(training_ppl, rows),
        "training_ppl": masked_mean(training_ppl.exp(), rows),
        "rollout_log_ppl": masked_mean(rollout_ppl, rows),
        "rollout_ppl": masked_mean(rollout_ppl.exp(), rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": extreme(difference, rows, "max"),
        "log_ppl_diff_min": extreme(difference, rows, "min"),
        "ppl_ratio": masked_mean(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), rows),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _quantiles(values: Tensor) -> dict[str, Tensor]:
    """Nearest-rank quantiles; by selection, because ``torch.quantile`` refuses more than 16 million values."""
    count = values.numel()
    return {
        f"log_ratio_{name}": values.kthvalue(max(1, math.ceil(q * count))).values if count else values.new_zeros(())
        for name, q in QUANTILES.items()
    }

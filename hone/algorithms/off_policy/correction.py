"""Rollout correction: importance weights, rejection, veto and diagnostics of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.masked import where_mask, wide
from hone.algorithms.off_policy.diagnostics import off_policy_metrics
from hone.algorithms.off_policy.rejection import reject, veto
from hone.algorithms.off_policy.rules import CorrectionRules, Threshold
from hone.algorithms.off_policy.weights import bounded, importance_ratio, normalized, weight_metrics


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
            means 1/u to u), ``k2`` and ``k3`` an upper bound.
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
    kept, rejected = reject(log_ratio, response_mask, rules.rejections)
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

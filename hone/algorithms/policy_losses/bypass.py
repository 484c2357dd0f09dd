"""Loss of runs that never recompute old log-probs and use the sampling engine's instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algorithms.off_policy.correction import bounded, importance_ratio, reject, veto
from hone.algorithms.off_policy.rules import CorrectionRules, Threshold, check_rollout_correction
from hone.algorithms.policy_losses.base import TokenLoss, register_policy_loss, token_ratio, vanilla


@torch.no_grad()
def correct(
    log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, rules: CorrectionRules
) -> tuple[Tensor | None, Tensor]:
    """Return weights ``[B, T]`` (or None) and the remaining tokens (bool) of policy against sampling engine."""
    kept, _ = reject(log_probs, rollout_log_probs, response_mask, rules.rejections)
    log_ratio = log_probs - rollout_log_probs
    if rules.veto is not None:
        kept = kept & veto(log_ratio, response_mask, rules.veto)[0]
    if rules.weight is None:
        return None, kept
    ratio, _ = importance_ratio(log_ratio, response_mask, rules.weight.level)
    return bounded(ratio, rules.weight).expand_as(log_ratio), kept


@register_policy_loss(
    "bypass_mode",
    formula="ppo_clip: vanilla; reinforce: -A w log pi; r and w against the sampling engine, 0 for rejected tokens",
    paper="Liu et al. 2025, When Speed Kills Stability (https://richardli.xyz/rl-collapse)",
)
def bypass_mode(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_rs: str | Sequence[str] | None = None,
    rollout_rs_threshold: Threshold | None = None,
    rollout_token_veto_threshold: float | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """Use two policies instead of three: ``old_log_probs`` are those that the sampling engine reported.

    This saves one forward pass per step. Options other than the clip are those of
    :func:`~hone.algorithms.off_policy.correction.rollout_correction`, applied to policy / engine in every update.
    With ``ppo_clip`` the ratio already is the importance weight; with ``reinforce`` the weight is that of ``rollout_is``, or 1.
    Rejected tokens lose their gradient and still count in the denominator of the aggregation, like clipped ones: the
    counts of a mini-batch are known before its forward passes, and do not depend on the split.
    """
    rules = check_rollout_correction(
        bypass_mode=True,
        loss_type=loss_type,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
    )
    weights, kept = correct(log_probs.detach(), old_log_probs, response_mask, rules)
    rejected = ~kept & response_mask
    if loss_type == "ppo_clip":
        clips = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
        part = vanilla.per_token(old_log_probs, log_probs, advantages, response_mask, **clips)
        part.loss = torch.where(kept, part.loss, 0.0)
    else:
        loss = -advantages * log_probs if weights is None else -advantages * weights * log_probs
        part = TokenLoss(torch.where(kept, loss, 0.0), token_ratio(old_log_probs, log_probs.detach()))
        if weights is not None:
            part.statistics["rollout_is_weight"] = weights
    part.statistics["rollout_rejected"] = rejected
    return part

"""Estimators that compare the score of a response with those of the other responses to its prompt.

The score ``s`` is the sum of a response's rewards; the advantage is the same on all its tokens, and the returns equal
the advantages. A response without others has no baseline: in all estimators here that allow it, its advantage is computed
from the score itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import (
    Groups,
    Result,
    broadcast,
    broadcast_twice,
    register_estimator,
    sequence_scores,
    token_counts,
    whiten_,
)
from hone.errors import ConfigError, did_you_mean

Ids = Sequence[Any] | Tensor
GPG_COUNTS = ("scores", "advantages")


def centred(scores: Tensor, groups: Groups) -> Tensor:
    """Return ``s - mean of the group``, ``[B]``; the score itself in a group of one."""
    return scores - torch.where(groups.singleton, 0.0, groups.mean(scores))


def normalised(scores: Tensor, groups: Groups, *, by_std: bool, epsilon: float) -> Tensor:
    """Return GRPO's advantage, ``[B]``: centred, and with ``by_std`` divided by the group's standard deviation + epsilon."""
    advantages = centred(scores, groups)
    return advantages / (torch.where(groups.singleton, 1.0, groups.std(scores)) + epsilon) if by_std else advantages


@register_estimator(
    "grpo",
    "grpo_vectorized",
    formula="A = (s - mean of the group) / (std of the group + epsilon); without norm_adv_by_std_in_grpo A = s - mean",
    paper="Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); without std: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783",
    group_of_one="no baseline: the advantage is the score itself (divided by 1 + epsilon when normalising)",
    scope="group",
)
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Compare the score of a response with the mean of its group, in units of the group's standard deviation.

    The standard deviation divides by n - 1. A group of equal scores has advantage 0. Without the division (Dr. GRPO),
    groups with nearly equal scores are not amplified. Both names use ``norm_adv_by_std_in_grpo``; verl's
    ``grpo_vectorized`` ignores it.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    scores = sequence_scores(token_level_rewards)
    advantages = normalised(scores, groups, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
    return broadcast_twice(advantages, response_mask, token_level_rewards.dtype)


@register_estimator(
    "grpo_passk",
    formula="A = (s - second best of the group) / (std of the group + epsilon) for the best response, 0 for the others",
    paper="Tang et al. 2025, arXiv:2503.19595, leave-one-out pass@k",
    group_of_one="refused: pass@k needs a second best (a group whose other responses are all masked out gets 0)",
    min_group=2,
    scope="group",
)
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Reward only the best response of each group, by its lead: this improves the maximum of the group.

    The advantage is the maximum of n scores minus that of the other n - 1, which is 0 for all but the best; a tie for the
    best has advantage 0. Learning therefore stops for prompts that are solved twice in a group.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    scores = sequence_scores(token_level_rewards)
    best, second, leads = groups.best_two(scores)
    advantages = torch.where(leads & ~groups.singleton, best - second, 0.0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + epsilon)
    return broadcast_twice(advantages, response_mask, token_level_rewards.dtype)


@register_estimator(
    "rloo",
    "rloo_vectorized",
    formula="A = s - mean of the other responses = (s - mean of the group) n / (n - 1)",
    paper="Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019 (leave-one-out baseline)",
    group_of_one="no baseline: the advantage is the score itself",
    scope="group",
)
def rloo(token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: Ids) -> Result:
    """Compare the score of a response with the mean of the others: unbiased, because the baseline excludes the score.

    Both names treat a group of one alike; in verl ``rloo`` keeps the score and ``rloo_vectorized`` gives 0.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    scale = torch.where(groups.singleton, 1.0, groups.count / (groups.count - 1).clamp(min=1))
    advantages = centred(sequence_scores(token_level_rewards), groups) * scale
    return broadcast_twice(advantages, response_mask, token_level_rewards.dtype)


@register_estimator(
    "prime",
    formula="A_t = LOO(s) + process_coef sum over u >= t of (r_u - mean of the others' mean r)",
    paper="Cui et al. 2025 (PRIME), arXiv:2502.01456, eq. 5, with gamma = 1",
    group_of_one="no baselines: the score itself, and the sum of the process rewards to come",
    scope="group",
)
def prime(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    process_rewards: Tensor,
    process_coef: float = 1.0,
) -> Result:
    """Add a return of process rewards, one a token, to the outcome's leave-one-out advantage (:func:`rloo`).

    The baseline of a process reward is the mean over the other responses of their mean reward a token. Returns equal the outcome, by
    which the reward model of the process is trained (:func:`hone.algorithms.process_rewards.outcome_loss`).
    """
    groups, outcomes = Groups.from_ids(group_ids, response_mask), sequence_scores(token_level_rewards)
    others = (groups.count - 1).clamp(min=1)
    advantages = centred(outcomes, groups) * torch.where(groups.singleton, 1.0, groups.count / others)
    process = torch.where(response_mask.bool(), process_rewards.double(), 0.0)
    means = process.sum(-1) / token_counts(response_mask).clamp(min=1)
    baselines = torch.where(groups.singleton, 0.0, (groups.total(means) - means) / others)
    centred_process = torch.where(response_mask.bool(), process - baselines[:, None], 0.0)
    to_come = centred_process.flip(-1).cumsum(-1).flip(-1)
    dtype = token_level_rewards.dtype
    total = torch.where(response_mask.bool(), advantages[:, None] + process_coef * to_come, 0.0).to(dtype)
    return total, broadcast(outcomes, response_mask, dtype)


@register_estimator(
    "opo",
    formula="A = s - sum(length * s) / sum(length), sums over the group",
    paper="Hao et al. 2025 (OPO), arXiv:2505.23585, the optimal baseline weighted by length",
    group_of_one="no baseline: the advantage is the score itself",
    scope="group",
)
def opo(token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: Ids) -> Result:
    """Compare the score of a response with the group's mean weighted by length.

    This baseline has the least variance if the gradient of a response grows with its number of sampled tokens.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    scores, lengths = sequence_scores(token_level_rewards), token_counts(response_mask).double()
    baseline = groups.total(lengths * scores) / groups.total(lengths).clamp(min=1)
    advantages = scores - torch.where(groups.singleton, 0.0, baseline)
    return broadcast_twice(advantages, response_mask, token_level_rewards.dtype)


@register_estimator(
    "gpg",
    formula="A = alpha (s - mean of the group) / f_norm, alpha = responses / counted responses (gpg_count)",
    paper="Chu et al. 2025 (GPG), arXiv:2504.02546, with its accurate gradient estimation (alpha)",
    group_of_one="no baseline: the advantage is alpha times the score itself",
)
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    f_norm: float = 1.0,
    gpg_count: str = "scores",
) -> Result:
    """Return centred scores, scaled up for the responses of the batch that give no gradient.

    ``gpg_count=scores``, as in verl, counts the responses whose score is not 0 (right answers, with rewards 0 and 1).
    ``gpg_count=advantages``, as in the paper, counts those of groups with different scores; only these give a gradient.

    Raises:
        ConfigError: ``gpg_count`` has another value.
    """
    if gpg_count not in GPG_COUNTS:
        raise ConfigError(
            f"unknown gpg_count '{gpg_count}'", fix=did_you_mean(gpg_count, GPG_COUNTS), where="algorithm.gpg_count"
        )
    groups = Groups.from_ids(group_ids, response_mask)
    scores = sequence_scores(token_level_rewards)
    counted = scores != 0 if gpg_count == "scores" else ~groups.agree(scores)
    alpha = groups.member.sum().double() / (counted & groups.member).sum().clamp(min=1)
    advantages = centred(scores, groups)
    return broadcast_twice(alpha * advantages / f_norm, response_mask, token_level_rewards.dtype)


@register_estimator(
    "maxrl",
    formula="A = (s - mean of the group) / (mean of |s| of the group + epsilon)",
    paper="Tajwar et al. 2026 (MaxRL), arXiv:2602.02710, algorithm 1",
    group_of_one="no baseline: the advantage is the score itself (the first order of MaxRL is REINFORCE)",
    scope="group",
)
def maxrl(token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: Ids, epsilon: float = 1e-6) -> Result:
    """Compare the score of a response with its group, in units of the group's mean success: the limit is maximum likelihood.

    A group of n gives the n-th order of the expansion of ``log p(success)``: rare successes have weight 1/p. A group
    without any success has advantage 0. Designed for scores of 0 and 1, where ``mean |s|`` is the success rate of the
    paper. With negative scores the mean could be 0 or negative and reverse the gradient; ``mean |s|`` cannot.
    """
    groups = Groups.from_ids(group_ids, response_mask)
    scores = sequence_scores(token_level_rewards)
    scale = torch.where(groups.singleton, 1.0, groups.mean(scores.abs()) + epsilon)
    return broadcast_twice(centred(scores, groups) / scale, response_mask, token_level_rewards.dtype)


@register_estimator(
    "gdpo",
    formula="A = sum_k w_k (s_k - mean of the group) / (std of the group + epsilon), whitened over the batch",
    paper="Liu et al. 2026 (GDPO), arXiv:2601.05242, decoupled and batch-wise normalisation",
    group_of_one="no baseline: each component is the score itself (divided by 1 + epsilon when normalising)",
)
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Sequence[Any] | Tensor,
    reward_components: Mapping[str, Tensor],
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Add GRPO's advantage of each reward component with weights; returns equal advantages.

    Responses with equal sums but different components keep different advantages: a right answer in the wrong form is not
    worth the same as a wrong answer in the right form. ``gdpo_reward_keys`` selects the components (null: all),
    ``gdpo_reward_weights`` has one weight for each (null: 1). The token rewards are not used, and a KL penalty among
    them has no effect: use a KL term in the loss. The paper whitens over responses; here, as in verl, it is over tokens.
    """
    keys, weights = _chosen(reward_components, gdpo_reward_keys, gdpo_reward_weights)
    groups = Groups.from_ids(group_ids, response_mask)
    parts = [
        weight * normalised(reward_components[key], groups, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
        for key, weight in zip(keys, weights, strict=True)
    ]
    total = torch.stack(parts).sum(dim=0)
    advantages = whiten_(broadcast(total, response_mask, token_level_rewards.dtype), response_mask)
    return advantages, advantages.clone()


def _chosen(
    components: Mapping[str, Tensor], keys: Sequence[str] | None, weights: Sequence[float] | None
) -> tuple[list[str], list[float]]:
    chosen = list(components) if keys is None else list(keys)
    if not chosen:
        raise ConfigError(
            "gdpo has 0 reward components",
            fix="algorithm.gdpo_reward_keys=[correct,format]",
            where="algorithm.gdpo_reward_keys",
        )
    for key in chosen:
        if key not in components:
            raise ConfigError(
                f"reward component '{key}' is missing",
                why="gdpo normalises each component separately",
                fix=f"let the reward function return it in addition to the score. {did_you_mean(key, components)}",
                where="algorithm.gdpo_reward_keys",
            )
    if weights is not None and len(weights) != len(chosen):
        raise ConfigError(
            f"gdpo_reward_weights has {len(weights)} entries for {len(chosen)} components",
            fix=f"algorithm.gdpo_reward_weights={[1.0] * len(chosen)}",
            where="algorithm.gdpo_reward_weights",
        )
    return chosen, [1.0] * len(chosen) if weights is None else [float(w) for w in weights]

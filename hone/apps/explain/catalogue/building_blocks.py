"""Facts about methods without a registry: KL estimators, aggregations, corrections, and related parts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hone import algorithms
from hone.apps.explain.catalogue.records import Block, Cost

NO_COPY = "no copy with LoRA: the reference is the policy with its adapter off"
BYPASS = "no old log-probs pass with algorithm.rollout_correction.bypass_mode=true"
NO_OLD = "no old log-probs pass with one update per batch, or with algorithm.rollout_correction.bypass_mode=true"

NEED_COSTS = {
    "values": Cost(("critic",), (), ("values",)),
    "greedy_baseline": Cost((), (), (), "one additional greedy response per prompt"),
    "groups": Cost((), (), (), "2 or more responses per prompt"),
}
"""Cost that a need of an estimator adds to a step; other needs add nothing."""

PREFERENCE_KEY = "loss.name"
PREFERENCE_BLOCK = "loss."

# ------------------------------------------------------------------------------------------------------------------ KL

_KL_PAPER = "Schulman 2020, Approximating KL divergence, http://joschu.net/blog/kl-approx.html"
_KL_KEYS = (
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.kl_ctrl.type",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.kl_ctrl.horizon",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_type",
    "actor_rollout_ref.actor.kl_loss_coef",
)


def _kl(name: str, formula: str, description: str, aliases: tuple[str, ...] = (), paper: str = _KL_PAPER) -> Block:
    return Block(
        formula=formula,
        paper=paper,
        description=description,
        select=f"algorithm.use_kl_in_reward=true algorithm.kl_penalty={name} (in the reward) or "
        f"actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type={name} (in the loss)",
        aliases=aliases,
        keys=_KL_KEYS,
        function=functools.partial(algorithms.kl_penalty, kind=name),
    )


KL_ESTIMATORS = {
    "k1": _kl(
        "k1",
        "d = log p - log p_ref",
        "The log-ratio of a sampled token. Its mean is the KL divergence; a single value may be negative. As a loss its "
        "expected gradient is 0, so it has no effect; `k1+` keeps the value and takes the gradient of `k2`.",
        ("kl",),
    ),
    "abs": _kl(
        "abs",
        "|d|, d = log p - log p_ref",
        "The size of the log-ratio: never negative, biased upwards. `abs+` takes the gradient of `k2`.",
    ),
    "k2": _kl(
        "k2",
        "d^2 / 2, d = log p - log p_ref",
        "Half the squared log-ratio: low variance, biased for distant policies, and as a loss it has the gradient of the "
        "true KL for samples of the policy itself.",
        ("mse",),
    ),
    "k3": _kl(
        "k3",
        "exp(-d) - 1 + d, d = log p - log p_ref",
        "Unbiased as a value, low variance, never negative. As a loss its gradient is that of the reversed divergence, and "
        "it is capped (no gradient beyond the cap); `k3+` takes the gradient of `k2`.",
        ("low_var_kl",),
    ),
}

# --------------------------------------------------------------------------------------------------------- aggregation


def _aggregation(name: str, formula: str, paper: str, description: str) -> Block:
    return Block(
        formula=formula,
        paper=paper,
        description=description,
        select=f"actor_rollout_ref.actor.loss_agg_mode={name}",
        function=functools.partial(algorithms.aggregate_loss, mode=name),
    )


AGGREGATIONS = {
    "token-mean": _aggregation(
        "token-mean",
        "sum over all tokens / number of tokens of the mini-batch",
        "Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8",
        "Every token of the mini-batch weighs the same, so a long response weighs more than a short one.",
    ),
    "token-sum": _aggregation(
        "token-sum",
        "sum over all tokens",
        "REINFORCE as written, Williams 1992",
        "No division: the size of a step grows with the number of tokens in the mini-batch.",
    ),
    "seq-mean-token-sum": _aggregation(
        "seq-mean-token-sum",
        "sum over the tokens of a response, mean over responses",
        "the policy gradient of a trajectory, Williams 1992",
        "The log-probability of a whole response is weighted: the unbiased policy gradient of one action, the response.",
    ),
    "seq-mean-token-sum-norm": _aggregation(
        "seq-mean-token-sum-norm",
        "sum over the tokens of a response / loss_scale_factor, mean over responses",
        "Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2",
        "As seq-mean-token-sum, divided by a constant length so that usual learning rates apply.",
    ),
    "seq-mean-token-mean": _aggregation(
        "seq-mean-token-mean",
        "mean over the tokens of a response, mean over responses",
        "Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3",
        "Every response weighs the same, so a token of a long response weighs less than one of a short response.",
    ),
}

# --------------------------------------------------------------------------------------------------- rollout correction

_CORRECTION = "algorithm.rollout_correction"


def correction(name: str, values: Mapping[str, Any]) -> tuple[Block, Cost, tuple[str, ...]]:
    """Return the record of a named preset of rollout correction: ``values`` maps its configuration keys to values."""
    unset = algorithms.ROLLOUT_CORRECTION_PRESETS["disabled"]
    changed = {key: value for key, value in values.items() if value != unset[key]}
    settings = ", ".join(f"{key}={_value_text(value)}" for key, value in changed.items())
    block = Block(
        formula=_correction_formula(values),
        paper="Espeholt et al. 2018 (truncated importance sampling), arXiv:1802.01561; Yao et al. 2025, "
        "https://fengyao.notion.site/off-policy-rl; Liu et al. 2025, https://richardli.xyz/rl-collapse",
        description="A named set of switches for the gap between the engine that samples and the model that trains.",
        select=f"{_CORRECTION}.preset={name}",
        remarks={"Sets": settings or "nothing"},
    )
    forward = () if values["bypass_mode"] else ("old log-probs",)
    return block, Cost(forward=forward), tuple(f"{_CORRECTION}.{key}" for key in changed)


def _correction_formula(values: Mapping[str, Any]) -> str:
    ratio = "policy / engine" if values.get("bypass_mode") else "old policy / engine"
    parts = []
    if values.get("rollout_is"):
        limit = str(values.get("rollout_is_threshold", 2.0))
        how = "0 outside " + limit.replace("_", " to ") if "_" in limit else f"at most {limit}"
        parts.append(f"weight = {ratio} by {values['rollout_is']}, {how}")
    if values.get("rollout_rs"):
        parts.append(f"reject by {values['rollout_rs']} beyond {values.get('rollout_rs_threshold')}")
    if values.get("bypass_mode"):
        parts.append(f"ratio and weight against the engine, loss {values.get('loss_type', 'ppo_clip')}")
    return "; ".join(parts) or "measured, not corrected"


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------ building blocks

_DISTILLATION = (
    "path", "teachers", "self_teacher", "teacher_prompt", "loss_mode", "use_policy_gradient", "topk", "beta",
    "tail_bucket", "coef", "task_weight", "log_prob_min_clamp", "loss_max_clamp",
)  # fmt: skip
_ONLINE = "actor_rollout_ref.actor.preference_loss"
_REFERENCE = Cost(frozen=("reference",), forward=("reference log-probs",), saving=NO_COPY)

BLOCKS: dict[str, Block] = {
    "value_loss": Block(
        "0.5 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2)",
        "Schulman et al. 2017, arXiv:1707.06347, section 5, with the clip of the code published with it",
        "The critic's loss: half the squared error against the returns, pessimistic about large moves.",
        select="critic.enable=true",
        cost=Cost(trained=("policy", "critic"), forward=("values",)),
        keys=("critic.cliprange_value", "critic.loss_agg_mode", "critic.ppo_epochs", "trainer.critic_warmup"),
        function=algorithms.value_loss,
    ),
    "kl_controller": Block(
        "fixed: kl_coef; adaptive: kl_coef *= 1 + clip(KL / target_kl - 1, -0.2, 0.2) sequences / horizon",
        "Ziegler et al. 2019, arXiv:1909.08593, section 2.2",
        "The coefficient of the KL penalty in the reward: a constant, or adapted so that the KL reaches a target.",
        select="algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive",
        cost=_REFERENCE,
        keys=tuple(f"algorithm.kl_ctrl.{key}" for key in ("type", "kl_coef", "target_kl", "horizon")),
        function=algorithms.kl_controller,
    ),
    "full_kl": Block(
        "sum over the vocabulary of p (log p - log p_ref); with top-k, over k tokens, with the rest as one",
        "Kullback and Leibler 1951",
        "The KL divergence of whole next-token distributions instead of an estimate from the sampled token. In a run the starting "
        "policy is then a teacher, next to the reward; `hone.algorithms.full_kl` is the same for log-probs at hand.",
        select="distillation.enable=true distillation.loss_mode=reverse_kl distillation.task_weight=1 distillation.coef=0.001",
        aliases=("full",),
        cost=Cost(frozen=("starting policy",), forward=("its hidden states",)),
        keys=tuple(f"distillation.{key}" for key in ("loss_mode", "topk", "coef", "task_weight")),
        function=algorithms.full_kl,
    ),
    "entropy_bonus": Block(
        "loss = policy loss - entropy_coeff H(pi), H aggregated like the policy loss",
        "Williams and Peng 1991; Mnih et al. 2016, arXiv:1602.01783, section 4",
        "A reward for high entropy: the mean entropy of the next-token distributions is added to the objective.",
        select="actor_rollout_ref.actor.entropy_coeff=0.001",
        keys=("actor_rollout_ref.actor.entropy_coeff",),
        function=algorithms.entropy_from_logits,
    ),
    "filter_groups": Block(
        "replace every group whose scores are all equal by a new prompt, until the batch is full",
        "Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2",
        "Dynamic sampling: groups whose answers are all equally good have advantage 0 and no gradient, so new prompts are "
        "sampled in their place, up to a limit.",
        select="algorithm.filter_groups.enable=true",
        cost=Cost(generation="more prompts per step than the update uses"),
        keys=tuple(f"algorithm.filter_groups.{key}" for key in ("enable", "metric", "max_num_gen_batches")),
    ),
    "overlong_buffer": Block(
        "score -= penalty_factor clip((length - (max_response_length - len)) / len, 0, 1)",
        "Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13",
        "A soft penalty for responses near the length limit, instead of the abrupt loss of a truncated answer.",
        select="reward.overlong_buffer.enable=true",
        keys=tuple(f"reward.overlong_buffer.{key}" for key in ("enable", "len", "penalty_factor", "log")),
        function=algorithms.overlong_penalty,
    ),
    "pf_ppo": Block(
        "resample the batch with replacement, with weights |score|^weight_pow (pow), best and worst (max_min), ...",
        "Zhang et al. 2024, Policy Filtration for RLHF, arXiv:2409.06957, section 4",
        "Resampling by score: the update uses more of the samples with a reliable reward.",
        select="algorithm.use_pf_ppo=true",
        keys=("algorithm.use_pf_ppo", "algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"),
        function=algorithms.resample,
    ),
    "rollout_correction": Block(
        "r = policy / engine; weight = min(r, threshold), or 0 outside bounds; reject tokens or sequences by k1, k2, k3 of r",
        "Espeholt et al. 2018, arXiv:1802.01561; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; "
        "Liu et al. 2025, https://richardli.xyz/rl-collapse",
        "Correction of the gap between the engine that samples and the model that trains.",
        select=f"{_CORRECTION}.preset=decoupled_token_is",
        keys=tuple(f"{_CORRECTION}.{key}" for key in ("preset", *algorithms.ROLLOUT_CORRECTION_PRESETS["disabled"])),
        cost=Cost(forward=("old log-probs",), saving=BYPASS),
        remarks={"Named presets": ", ".join(algorithms.ROLLOUT_CORRECTION_PRESETS)},
        function=algorithms.rollout_correction,
    ),
    "distillation": Block(
        "D(teacher, student) at each token of the student's samples; D = forward KL, reverse KL, JSD, or k1, k2, k3",
        "Agarwal et al. 2024, arXiv:2306.13649, eq. 4; as a policy gradient: Lu 2025, "
        "https://thinkingmachines.ai/blog/on-policy-distillation",
        "On-policy distillation: the student samples, and a teacher gives its distribution of the next token at every position.",
        select="distillation.enable=true distillation.path=TEACHER",
        cost=Cost(frozen=("teacher",), forward=("teacher log-probs",)),
        keys=tuple(f"distillation.{key}" for key in _DISTILLATION),
        function=algorithms.distillation_loss,
    ),
    "bradley_terry": Block(
        "-log sigmoid(s_chosen - s_rejected - margin) + centering_coeff (s_chosen + s_rejected)^2",
        "Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1",
        "The loss of a reward model: the score of the chosen response should be above that of the rejected one.",
        select="hone reward-model (its model scores a run with reward.reward_model.enable=true)",
        cost=Cost(trained=("reward model",)),
        keys=tuple(f"reward.reward_model.{key}" for key in ("enable", "path", "combine", "coef")),
        function=algorithms.bradley_terry_loss,
    ),
    "online_pairs": Block(
        "the best and the worst response of each group, if they differ by more than the margin",
        "Guo et al. 2024 (online AI feedback), arXiv:2402.04792",
        "Preference pairs from the policy's own samples: used by `hone data pairs` and online DPO.",
        select=f"{_ONLINE}.loss_mode=dpo actor_rollout_ref.actor.use_kl_loss=false",
        cost=Cost(frozen=("reference",), generation="2 or more responses per prompt", saving=NO_COPY),
        keys=tuple(f"{_ONLINE}.{key}" for key in ("loss_mode", "beta", "margin")),
        function=algorithms.best_worst_pairs,
    ),
}

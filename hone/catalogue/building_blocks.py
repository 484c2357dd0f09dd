"""Facts about methods that stand in no registry: KL estimators, aggregations, corrections, and the parts around them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hone import algorithms
from hone.catalogue.records import Block, Cost

NEED_COSTS = {
    "values": Cost(("critic",), (), ("values",)),
    "greedy_baseline": Cost((), (), (), "one greedy response a prompt on top"),
    "groups": Cost((), (), (), "2 responses or more a prompt"),
}
"""What a need of an estimator adds to a step; needs that are left out add nothing."""

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
        select=f"algorithm.kl_penalty={name} (in the reward) or actor_rollout_ref.actor.kl_loss_type={name} (in the loss)",
        aliases=aliases,
        keys=_KL_KEYS,
        function=functools.partial(algorithms.kl_penalty, kind=name),
    )


KL_ESTIMATORS = {
    "k1": _kl(
        "k1",
        "d = log p - log p_ref",
        "The log-ratio of a sampled token. Its mean is the KL divergence; a single value may be negative. As a loss its "
        "expected gradient is 0, so as a loss it holds nothing back; `k1+` keeps the value and takes the gradient of `k2`.",
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
        "Half the squared log-ratio: low variance, biased for policies far apart, and as a loss it has the gradient of the "
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
        "No division at all: the size of a step grows with the number of tokens in the mini-batch.",
    ),
    "seq-mean-token-sum": _aggregation(
        "seq-mean-token-sum",
        "sum over the tokens of a response, mean over responses",
        "the policy gradient of a trajectory, Williams 1992",
        "The log-probability of a whole response is what is weighted: the unbiased policy gradient of one action, the response.",
    ),
    "seq-mean-token-sum-norm": _aggregation(
        "seq-mean-token-sum-norm",
        "sum over the tokens of a response / loss_scale_factor, mean over responses",
        "Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2",
        "As seq-mean-token-sum, divided by a constant length so that the numbers keep the size that learning rates are used to.",
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
    """The record of a named preset of rollout correction: ``values`` maps its configuration keys to values."""
    unset = algorithms.ROLLOUT_CORRECTION_PRESETS["disabled"]
    changed = {key: value for key, value in values.items() if value != unset[key]}
    settings = " ".join(f"{_CORRECTION}.{key}={_plain(value)}" for key, value in changed.items())
    block = Block(
        formula=_correction_formula(values),
        paper="Espeholt et al. 2018 (truncated importance sampling), arXiv:1802.01561; Yao et al. 2025, "
        "https://fengyao.notion.site/off-policy-rl; Liu et al. 2025, https://richardli.xyz/rl-collapse",
        description="A named set of switches for the gap between the engine that samples and the model that trains.",
        select=settings or f"nothing: it is the default of {_CORRECTION}",
    )
    forward = () if values["bypass_mode"] else ("old log-probs",)
    return block, Cost(forward=forward), tuple(f"{_CORRECTION}.{key}" for key in values)


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


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------ building blocks

BLOCKS: dict[str, Block] = {}

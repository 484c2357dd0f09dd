"""Metrics of `hone prefer` and `hone reward-model`; part of the table in :mod:`hone.insight.metric_table`."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

_NUMBERS = (
    (
        "rewards/chosen",
        "reward",
        "Reward of chosen responses: implicit (prefer) or the model's score (reward-model).",
    ),
    ("rewards/rejected", "reward", "Reward of rejected responses."),
    ("rewards/margins", "reward", "Reward of the chosen response minus that of the rejected one."),
    (
        "rewards/accuracies",
        "share of pairs",
        "Pairs whose chosen response has the higher reward, ties count half; with labels only: responses on the right side. "
        "Look when 0.5 after many steps: nothing is learned; raise the learning rate or lower beta.",
    ),
    (
        "logps/chosen",
        "nats",
        "Log-prob of a whole chosen response. Look when it falls together with logps/rejected: neither response gains probability; lower the "
        "learning rate or raise beta.",
    ),
    ("logps/rejected", "nats", "Log-prob of a whole rejected response."),
    (
        "preference/nll",
        "nats",
        "Negative log-likelihood per token of chosen responses, as in the loss (orpo, cpo).",
    ),
    ("preference/log_odds", "nats", "Log odds of chosen minus rejected responses (orpo)."),
    ("preference/kl", "nats", "Estimated KL to the reference that rewards are compared with (kto)."),
)

_ONLINE = MetricSpec(
    "actor/preference_pairs",
    "pairs",
    Reduction.SUM,
    "Online preference optimisation: prompts whose best and worst answer form a pair. "
    "Look when 0: nothing was learned in this step; use more answers per prompt, or problems of suitable difficulty.",
)

PREFERENCE_METRICS = (_ONLINE,) + tuple(
    MetricSpec(f"{prefix}{name}", unit, Reduction.MEAN, f"{where}{meaning}")
    for prefix, where in (("", ""), ("val/", "Held-out: "))
    for name, unit, meaning in _NUMBERS
)

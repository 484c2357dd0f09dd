"""Losses on pairs without a reference policy: one model in memory, one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.algorithms.preference_losses.base import PairLoss, Responses, register_preference_loss
from hone.algorithms.preference_losses.direct import smoothed_logistic

LARGEST_LOG_PROB = -1e-6
"""Upper limit of mean log-probs before odds are computed: at probability 1 they would be infinite."""


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` for ``p = exp(mean_log_prob)``."""
    x = mean_log_prob.clamp(max=LARGEST_LOG_PROB)
    return x - torch.log(-torch.expm1(x))


@register_preference_loss(
    "orpo",
    formula="-(mean log-prob of chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected))",
    paper="Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7 (beta is the paper's lambda)",
)
def orpo(chosen: Responses, rejected: Responses, *, beta: float = 0.1) -> PairLoss:
    """Fine-tune on the chosen response, with a penalty on the odds of the rejected one (odds-ratio optimisation).

    Odds are those of the geometric mean probability per token. The likelihood term is averaged over the tokens of each
    response, then over pairs, independent of micro-batches.
    """
    likelihood, worse = chosen.mean_log_prob, rejected.mean_log_prob
    gap = log_odds(likelihood) - log_odds(worse)
    loss = -likelihood - beta * logsigmoid(gap)
    statistics = {"preference/nll": -likelihood, "preference/log_odds": gap}
    return PairLoss(loss, beta * likelihood, beta * worse, statistics)


@register_preference_loss(
    "simpo",
    formula="-log sigmoid(beta (mean log-prob of chosen - mean log-prob of rejected) - simpo_gamma)",
    paper="Meng et al. 2024, arXiv:2405.14734, eq. 6",
)
def simpo(
    chosen: Responses,
    rejected: Responses,
    *,
    beta: float = 2.0,
    simpo_gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Use the mean log-prob per token as the reward, as generation ranks responses (simple preference optimisation).

    The chosen response has to win by ``simpo_gamma``, a difference of rewards as in the paper. Where an implementation
    uses gamma / beta, divide.
    """
    better, worse = beta * chosen.mean_log_prob, beta * rejected.mean_log_prob
    return PairLoss(smoothed_logistic(better - worse - simpo_gamma, label_smoothing), better, worse)


@register_preference_loss(
    "cpo",
    formula="-log sigmoid(beta (log pi(chosen) - log pi(rejected))) - cpo_alpha (mean log-prob of chosen)",
    paper="Xu et al. 2024, arXiv:2401.08417, section 3",
)
def cpo(
    chosen: Responses, rejected: Responses, *, beta: float = 0.1, cpo_alpha: float = 1.0, label_smoothing: float = 0.0
) -> PairLoss:
    """Use DPO with a uniform reference, plus the likelihood of the chosen response (contrastive optimisation).

    The likelihood is averaged over the tokens, because its weight would otherwise grow with the length.
    """
    better, worse = beta * chosen.log_probs, beta * rejected.log_probs
    loss = smoothed_logistic(better - worse, label_smoothing) - cpo_alpha * chosen.mean_log_prob
    return PairLoss(loss, better, worse, {"preference/nll": -chosen.mean_log_prob})

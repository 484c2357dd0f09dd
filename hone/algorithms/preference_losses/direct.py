"""Losses on pairs and a reference policy: DPO and its relatives.

Throughout ``h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)``, of whole responses; the implicit
reward of a response is ``beta (log pi - log pi_ref)``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from hone.algorithms.masked import masked_mean, where_mask
from hone.algorithms.preference_losses.base import LabelLoss, PairLoss, Responses, register_preference_loss


def smoothed_logistic(scaled: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``: the order of a pair is wrong with probability ``e``."""
    return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)


def _with_rewards(loss: Tensor, chosen: Responses, rejected: Responses, beta: float) -> PairLoss:
    return PairLoss(loss, beta * chosen.log_ratio, beta * rejected.log_ratio)


@register_preference_loss(
    "dpo",
    "sigmoid",
    formula="-(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)",
    paper="Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing: Mitchell 2023, conservative DPO",
)
def dpo(chosen: Responses, rejected: Responses, *, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """Fit a Bradley-Terry model whose reward is the policy's log-ratio to its reference (direct preference optimisation).

    A larger ``beta`` keeps the policy closer to the reference. ``label_smoothing`` above 0 is conservative DPO: the loss
    has its minimum at a finite margin.
    """
    h = chosen.log_ratio - rejected.log_ratio
    return _with_rewards(smoothed_logistic(beta * h, label_smoothing), chosen, rejected, beta)


@register_preference_loss(
    "robust",
    "robust_dpo",
    formula="(-(1 - label_smoothing) log sigmoid(beta h) + label_smoothing log sigmoid(-beta h)) / (1 - 2 label_smoothing)",
    paper="Ray Chowdhury et al. 2024, arXiv:2403.00409, section 3",
)
def robust(chosen: Responses, rejected: Responses, *, beta: float = 0.1, label_smoothing: float = 0.1) -> PairLoss:
    """Use DPO for labels of which a known share ``label_smoothing`` is wrong.

    In expectation over the wrong labels it equals DPO on the right ones. Unlike conservative DPO it may be negative.
    """
    x = beta * (chosen.log_ratio - rejected.log_ratio)
    loss = (-(1 - label_smoothing) * logsigmoid(x) + label_smoothing * logsigmoid(-x)) / (1 - 2 * label_smoothing)
    return _with_rewards(loss, chosen, rejected, beta)


@register_preference_loss(
    "hinge",
    formula="max(0, 1 - beta h)",
    paper="Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425, eq. 1, with the log-ratio of Liu et al. 2023 (RSO), arXiv:2309.06657",
)
def hinge(chosen: Responses, rejected: Responses, *, beta: float = 0.1) -> PairLoss:
    """Use the hinge on the same margin as DPO: pairs with a margin of 1 / beta nats have no gradient."""
    return _with_rewards(relu(1 - beta * (chosen.log_ratio - rejected.log_ratio)), chosen, rejected, beta)


@register_preference_loss(
    "ipo",
    formula="(h - 1 / (2 beta))^2",
    paper="Azar et al. 2023, arXiv:2310.12036, eq. 17",
)
def ipo(chosen: Responses, rejected: Responses, *, beta: float = 0.1, average_log_prob: bool = False) -> PairLoss:
    """Regress the margin to ``1 / (2 beta)`` instead of maximising it (identity preference optimisation).

    The paper uses log-probs of whole responses, which is the default here. ``average_log_prob`` divides each by its
    number of tokens, as several implementations do: the target is then a margin per token, and needs a larger ``beta``.
    """
    if average_log_prob:
        chosen, rejected = chosen.averaged(), rejected.averaged()
    h = chosen.log_ratio - rejected.log_ratio
    return _with_rewards((h - 1 / (2 * beta)).square(), chosen, rejected, beta)


@register_preference_loss(
    "sppo",
    "sppo_hard",
    formula="(log-ratio(chosen) - 1 / (2 beta))^2 + (log-ratio(rejected) + 1 / (2 beta))^2",
    paper="Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with win probabilities 1 and 0 and eta = 1 / beta",
)
def sppo(chosen: Responses, rejected: Responses, *, beta: float = 0.001) -> PairLoss:
    """Regress each side to a separate target (self-play preference optimisation with hard labels).

    Unlike with DPO, the chosen response cannot lose probability even if the rejected one loses more.
    """
    target = 1 / (2 * beta)
    loss = (chosen.log_ratio - target).square() + (rejected.log_ratio + target).square()
    return _with_rewards(loss, chosen, rejected, beta)


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


@register_preference_loss(
    "kto",
    formula="w (1 - sigmoid(beta (r - kl))) if desirable, w (1 - sigmoid(beta (kl - r))) if not; r = log pi - log pi_ref",
    paper="Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8",
)
def kto(
    responses: Responses,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabelLoss:
    """Use labels of single responses instead of pairs, compared with the current KL to the reference (Kahneman-Tversky).

    The estimate of the KL is a constant of the update and the same for all its micro-batches.

    The paper advises weights for which ``desirable_weight x good responses`` is 1 to 4/3 times ``undesirable_weight x
    bad ones``.
    """
    gap = beta * (responses.log_ratio - kl)
    loss = torch.where(
        labels, desirable_weight * (1 - torch.sigmoid(gap)), undesirable_weight * (1 - torch.sigmoid(-gap))
    )
    return LabelLoss(loss, beta * responses.log_ratio, (beta * kl).expand_as(gap))


def kto_kl(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Return KTO's estimate of the KL to the reference: ``max(0, mean of log pi(y'|x) - log pi_ref(y'|x))``.

    ``y'`` are responses to *other* prompts (Ethayarajh et al. 2024, section 4.2), ``[B, T]``; rows without a token are ignored.
    A scalar without gradient, for the argument ``kl`` of the loss.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    policy, reference = (where_mask(x.detach(), response_mask).to(dtype).sum(-1) for x in (log_probs, ref_log_probs))
    return masked_mean(policy - reference, response_mask.bool().any(-1)).clamp(min=0)

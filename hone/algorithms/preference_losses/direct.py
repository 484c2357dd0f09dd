"""Losses on pairs and a reference policy: DPO and its relatives.

Throughout ``h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)``, of whole responses; the implicit
reward of a response is ``beta (log pi - log pi_ref)``.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from hone.algorithms.preference_losses.base import PairLoss, Responses, register_preference_loss


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

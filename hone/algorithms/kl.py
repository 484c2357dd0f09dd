"""KL(policy || reference) at each token: estimates from the log-prob of the sampled token, and the exact value;
other divergences of two distributions. And the coefficient of the penalty in the reward: constant, or controlled towards a target.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, where_mask, wide
from hone.errors import ConfigError, InvariantError, did_you_mean

LOG_PROB_FLOOR = -1e4
"""Represents log 0 (an excluded token): its probability is exactly 0, and differences of log-probs stay finite."""

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def divergence(
    # normalised log-probs, ``[..., V]``; or, with ``tail_bucket``, of K tokens, ``[..., K]``
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,  # log-probs of the same tokens
    kind: str,  # one of :data:`DIVERGENCES`
    *,
    beta: float = 0.5,  # weight of the teacher in jsd, between 0 and 1; towards 0 jsd / beta is ``forward_kl``
    # whether the log-probs are of some tokens only; all others then count as one more token with the remaining mass.
    # The result is exact for these coarser distributions, and never above the divergence of the whole ones. A tail
    # below the resolution of the dtype has no gradient
    tail_bucket: bool = False,
    log_prob_floor: float = LOG_PROB_FLOOR,  # smallest log-prob; smaller ones are raised to it
) -> Tensor:
    """Sum a divergence over the last dimension. With teacher p and student q:

    ==============  ===================================================================================================
    ``forward_kl``  KL(p || q) = sum p (log p - log q): q covers all of p
    ``reverse_kl``  KL(q || p): q seeks a mode of p
    ``jsd``         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: between the others, bounded
                    (Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv:2306.13649, eq. 2)
    ==============  ===================================================================================================

    In nats, ``[...]``, float32 or better, differentiable in both.

    Raises:
        ConfigError: unknown kind, or ``beta`` outside (0, 1).
    """
    student, teacher = wide(student_log_probs), wide(teacher_log_probs)
    if tail_bucket:
        student, teacher = with_tail(student), with_tail(teacher)
    student, teacher = student.clamp(min=log_prob_floor), teacher.clamp(min=log_prob_floor)
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind != "jsd":
        raise ConfigError(f"unknown divergence '{kind}'", fix=did_you_mean(kind, DIVERGENCES))
    if not 0 < beta < 1:
        raise ConfigError(
            f"beta={beta} must be above 0 and below 1",
            why="at 0 and 1 the Jensen-Shannon divergence is 0 for every student",
            fix="use loss mode forward_kl, its limit at 0, or reverse_kl, its limit at 1 (each divided by the weight)",
        )
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def with_tail(log_probs: Tensor) -> Tensor:
    """Append the log of the probability of all other tokens to ``log_probs [..., K]``: ``[..., K + 1]``."""
    mass = log_probs.exp().sum(-1, keepdim=True)
    tail = torch.log1p(-mass.clamp(max=1.0 - torch.finfo(mass.dtype).eps))
    return torch.cat([log_probs, tail], dim=-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


SMALLEST_PROBABILITY = 1e-8
"""Lower bound for the probability of "any other token": log-probs are rounded, and log 0 is not finite."""


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) in nats of the two-way choice "this token, or any other", from the log-probs of the token."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    other_p, other_q = ((-x.expm1()).clamp(min=SMALLEST_PROBABILITY) for x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + other_p * (other_p / other_q).log()


LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def _k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs


def _abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).abs()


def _k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    gap = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(gap) - gap).clamp(max=K3_LIMIT)


_ESTIMATORS = {"k1": _k1, "kl": _k1, "abs": _abs, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3}

KL_KINDS = tuple(name + suffix for name in _ESTIMATORS for suffix in ("", "+"))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Estimate the KL divergence at each token (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    With ``d = log_probs - ref_log_probs``:

    ===================  =============================================================================================
    ``k1``, ``kl``       d: unbiased, noisy, may be negative. As a loss its expected gradient is 0.
    ``abs``              |d|
    ``k2``, ``mse``      d^2 / 2: biased, low variance; as a loss it has the gradient of the true KL.
    ``k3``, ``low_var_kl``  exp(-d) - 1 + d: unbiased, low variance, never negative; capped at 10 (no gradient there).
    ===================  =============================================================================================

    A ``+`` at the end of a name keeps the value and takes the gradient of ``k2`` (straight-through), which is that of
    the true KL in expectation over the policy's own samples (Liu et al. 2025, "Rethinking KL Regularization in RLHF",
    arXiv:2510.01555). The log-ratio is clamped to +-20 for k3.

    ``mask``: where it is 0 the result is that of equal log-probs, without gradient; NaN is allowed there. The reference is a
    constant. The result is in nats, float32 or better. The exact KL needs whole distributions: :func:`full_kl`.

    Raises:
        ConfigError: ``kind`` is none of :data:`KL_KINDS`.
    """
    base = _ESTIMATORS.get(kind.removesuffix("+"))
    if base is None and kind == "full":
        raise ConfigError(
            "the full KL cannot be computed from the log-probs of sampled tokens",
            why="it sums over the vocabulary, at every token",
            fix="use k3 as an estimate; hone.algorithms.full_kl(log_probs, ref_log_probs) computes it from distributions",
        )
    if base is None:
        raise ConfigError(f"unknown KL estimator '{kind}'", fix=did_you_mean(kind, KL_KINDS))
    if mask is not None:
        log_probs, ref_log_probs = where_mask(log_probs, mask), where_mask(ref_log_probs, mask)
    log_probs, ref_log_probs = wide(log_probs), wide(ref_log_probs).detach()
    value = base(log_probs, ref_log_probs)
    if not kind.endswith("+"):
        return value
    gradient = _k2(log_probs, ref_log_probs)
    return gradient - gradient.detach() + value.detach()


def full_kl(log_probs: Tensor, ref_log_probs: Tensor, *, top_k: bool = False) -> Tensor:
    """Return the exact KL(policy || reference) at each position: ``sum over tokens of p (log p - log p_ref)``.

    Both are log-probs over the whole vocabulary ``[..., V]`` (or logits: they are normalised here). With ``top_k`` they are
    normalised log-probs of K tokens ``[..., K]``; all others count as one, with the remaining mass. The result is then exact
    for these coarser distributions: at most the whole KL, and equal to it if the policies agree about the shares within the
    rest. In nats, float32 or better, not negative except for rounding.
    """
    policy, reference = wide(log_probs), wide(ref_log_probs).detach()
    if not top_k:
        policy, reference = policy.log_softmax(-1), reference.log_softmax(-1)
    return divergence(policy, reference, "reverse_kl", tail_bucket=top_k)


def apply_kl_penalty(
    token_level_scores: Tensor,  # ``[B, T]``
    old_log_probs: Tensor,  # log-probs of the sampling policy, ``[B, T]``
    ref_log_probs: Tensor,  # log-probs of the reference, ``[B, T]``
    response_mask: Tensor,  # ``[B, T]``
    kl_coef: float,  # coefficient, from a KL controller
    kind: str = "kl",  # see :func:`kl_penalty`
) -> tuple[Tensor, Tensor]:
    """Subtract a penalty for the distance to the reference from each sampled token: ``rewards = scores - kl_coef x KL``.

    Return token rewards ``[B, T]`` (0 outside the mask), and the mean KL for the controller's update: the mean over sequences
    (those with a selected token) of the mean over their tokens.
    """
    penalty = where_mask(kl_penalty(old_log_probs, ref_log_probs, kind, response_mask), response_mask)
    rewards = where_mask(token_level_scores - kl_coef * penalty, response_mask)
    return rewards, masked_mean(masked_mean(penalty, response_mask, dim=-1), response_mask.sum(dim=-1) > 0)


class KLController(Protocol):
    """Holder of the coefficient, ``value``; :meth:`update` is called once per step."""

    value: float

    def update(self, kl: float, n_steps: int) -> None:
        """Update with the step's mean KL over ``n_steps`` sequences."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        self.value = coef

    def update(self, kl: float, n_steps: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore nothing: the coefficient is the configured one, also after a resume."""


class AdaptiveKLController(FixedKLController):
    """A coefficient that rises while the KL is above its target and falls while it is below.

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon`` (Ziegler et al. 2019, arXiv:1909.08593, section
    2.2). A step of more than ``horizon`` sequences counts as ``horizon``; otherwise one of five times the horizon would
    set the coefficient to 0, and a larger one would make it negative, which rewards distance.

    Args:
        horizon: sequences over which the coefficient moves by at most 20 %.
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ConfigError(
                f"the adaptive KL controller needs target_kl > 0 and horizon > 0, got {target} and {horizon}",
                where="algorithm.kl_ctrl",
                fix="algorithm.kl_ctrl.target_kl=0.1 algorithm.kl_ctrl.horizon=10000",
            )
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, n_steps: int) -> None:
        """Move the coefficient; a NaN raises InvariantError, because the coefficient would keep it forever."""
        if math.isnan(kl):
            raise InvariantError(
                "the mean KL of this step is NaN",
                why="the KL coefficient, and with it every later reward, would be NaN too",
                fix="check for NaN in the log-probs of the policy and the reference",
                where="algorithm.kl_ctrl",
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(n_steps / self.horizon, 1.0)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def kl_controller(type: str, kl_coef: float, target_kl: float = 0.1, horizon: int = 10000) -> KLController:
    """Build the controller of ``algorithm.kl_ctrl``."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(
        f"unknown KL controller '{type}'", where="algorithm.kl_ctrl.type", fix=did_you_mean(type, ["fixed", "adaptive"])
    )

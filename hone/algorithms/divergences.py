"""Exact divergences between two next-token distributions: whole ones, or the k most likely tokens and the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.errors import ConfigError, did_you_mean

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

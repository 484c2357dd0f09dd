"""On-policy distillation: the student learns from a teacher's log-probs of the student's samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.kl import DIVERGENCES, KL_KINDS, LOG_PROB_FLOOR, divergence, kl_penalty
from hone.algorithms.masked import aggregate_loss, masked_mean, where_mask, wide
from hone.errors import ConfigError, did_you_mean


def span_sums(values: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the sum of its span, and the number of tokens in it; differentiable.

    >>> sums, sizes = span_sums(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 0, 1]]))
    >>> sums.tolist(), sizes.tolist()
    ([[3.0, 3.0, 4.0]], [[2.0, 2.0, 1.0]])

        A span is below ``T``; -1 is outside of the response, where the result is the value itself.
    """
    inside = spans >= 0
    index = spans.clamp(min=0)
    sums = torch.zeros_like(values).scatter_add(-1, index, torch.where(inside, values, 0.0))
    sizes = torch.zeros_like(values).scatter_add(-1, index, inside.to(values))
    return torch.where(inside, sums.gather(-1, index), values), torch.where(inside, sizes.gather(-1, index), 1.0)


TOP_K = "_topk"
DISTILLATION_MODES = (*KL_KINDS, *DIVERGENCES, *(kind + TOP_K for kind in DIVERGENCES))


def distillation_token_loss(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    loss_mode: str,
    *,
    beta: float = 0.5,
    tail_bucket: bool = True,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """Return the distance of the student from the teacher at each token, ``[B, T]``, with gradient in the student only.

    ==============================================  ===========  ==================================================
    ``loss_mode``                                   log-probs    meaning
    ==============================================  ===========  ==================================================
    k1, k2, k3, abs, their aliases and ``+`` forms  [B, T]       estimate of the reverse KL from the sampled token
                                                                 (:func:`~hone.algorithms.kl.kl_penalty`)
    ``forward_kl``, ``reverse_kl``, ``jsd``         [B, T, V]    exact (:func:`~hone.algorithms.kl.divergence`)
    ``forward_kl_topk``, ... ``jsd_topk``           [B, T, K]    exact for the teacher's K likeliest tokens and the
                                                                 remaining tokens, combined to one more token
    ==============================================  ===========  ==================================================

    Args:
        student_log_probs: normalised log-probs of the sampled token, of all tokens, or of the K tokens.
        teacher_log_probs: log-probs of the same tokens; a constant.
        loss_mode: one of :data:`DISTILLATION_MODES`.
        beta: weight of the teacher in jsd.
        tail_bucket: false excludes the remaining tokens and clamps at 0, as some other libraries do; for
            ``forward_kl_topk`` only. Its minimum is then not the teacher but a student with all its mass on the K tokens.
        log_prob_min_clamp: smallest log-prob (negative); smaller ones are raised to it and get no gradient.
        loss_max_clamp: a token's loss is limited to +- this (positive), without gradient beyond.
        spans: ``[B, T]`` int64, for estimates from the sampled token: the log-probs of a span's tokens are added up, the distance is of
            these sums, and each token of the span gets an equal part of it. See :func:`~hone.algorithms.distillation.span_sums`.

    Raises:
        ConfigError: unknown mode, a clamp of the wrong sign, ``tail_bucket=false`` for another mode, or spans of distributions.
    """
    if loss_mode not in DISTILLATION_MODES:
        raise ConfigError(
            f"unknown distillation loss '{loss_mode}'",
            where="loss_mode",
            fix=did_you_mean(loss_mode, DISTILLATION_MODES),
        )
    _check_clamps(log_prob_min_clamp, loss_max_clamp)
    if not tail_bucket and loss_mode != "forward_kl_topk":
        raise ConfigError(
            f"tail_bucket=false works with forward_kl_topk only, not with {loss_mode}",
            why="the other divergences over K tokens become negative as the student moves mass to other tokens",
            fix="tail_bucket=true",
            where="tail_bucket",
        )
    if spans is not None and loss_mode not in KL_KINDS:
        raise ConfigError(
            f"loss mode {loss_mode} compares distributions of the same tokens, not spans of text",
            fix="loss_mode=k1",
            where="loss_mode",
        )
    floor = LOG_PROB_FLOOR if log_prob_min_clamp is None else log_prob_min_clamp
    teacher_log_probs = teacher_log_probs.detach()
    kind = loss_mode.removesuffix(TOP_K)
    if kind in DIVERGENCES:
        bucket = tail_bucket and loss_mode.endswith(TOP_K)
        loss = divergence(
            student_log_probs, teacher_log_probs, kind, beta=beta, tail_bucket=bucket, log_prob_floor=floor
        )
        loss = loss if tail_bucket else loss.clamp(min=0)
    else:
        student, teacher = (wide(x).clamp(min=floor) for x in (student_log_probs, teacher_log_probs))
        if spans is None:
            loss = kl_penalty(student, teacher, kind)
        else:
            (student, sizes), (teacher, _) = span_sums(student, spans), span_sums(teacher, spans)
            loss = kl_penalty(student, teacher, kind) / sizes
    return loss if loss_max_clamp is None else loss.clamp(-loss_max_clamp, loss_max_clamp)


def distillation_loss(
    student_log_probs: Tensor,  # see :func:`distillation_token_loss`, also for the options
    teacher_log_probs: Tensor,  # same shape
    response_mask: Tensor,  # ``[B, T]``; values outside it, NaN included, affect neither loss nor gradient
    *,
    loss_mode: str = "reverse_kl_topk",
    loss_agg_mode: str = "token-mean",  # see :func:`~hone.algorithms.masked.aggregate_loss`, also for ``counts``
    beta: float = 0.5,
    tail_bucket: bool = True,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    **counts: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the supervised distillation loss on the student's samples (Agarwal et al. 2024, arXiv:2306.13649, eq. 4).

    Metrics ``distillation/...`` have no gradient: mean, mean size, minimum and maximum of the token losses, and for the top-k
    modes the probability of the K tokens together under each model.

    Raises:
        ConfigError: also for ``k1`` or ``kl``, whose expected gradient is 0.
    """
    if loss_mode in ("k1", "kl"):
        raise ConfigError(
            f"loss_mode={loss_mode} cannot be a loss: its gradient is 0 on average",
            why="d/dtheta E[log q - log p] over q's samples is a policy gradient, not the gradient of the sample",
            fix=f"loss_mode={loss_mode}+, or a policy loss with distillation_advantages(..., loss_mode={loss_mode})",
            where="loss_mode",
        )
    student, teacher = _inside(student_log_probs, teacher_log_probs, response_mask)
    token_loss = distillation_token_loss(
        student,
        teacher,
        loss_mode,
        beta=beta,
        tail_bucket=tail_bucket,
        log_prob_min_clamp=log_prob_min_clamp,
        loss_max_clamp=loss_max_clamp,
    )
    loss = aggregate_loss(token_loss, response_mask, loss_agg_mode, **counts)
    with torch.no_grad():
        selected = token_loss[response_mask.bool()]
        selected = selected if selected.numel() else selected.new_zeros(1)
        metrics = {
            "distillation/loss": selected.mean(),
            "distillation/abs_loss": selected.abs().mean(),
            "distillation/loss_min": selected.min(),
            "distillation/loss_max": selected.max(),
        }
        if loss_mode.endswith(TOP_K):
            for name, log_probs in (("student", student), ("teacher", teacher)):
                metrics[f"distillation/{name}_mass"] = masked_mean(wide(log_probs).exp().sum(-1), response_mask)
    return loss, metrics


def distillation_advantages(
    # log-probs of the sampling policy; see :func:`distillation_token_loss`, also for ``options``
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,  # same shape
    response_mask: Tensor,  # ``[B, T]``
    *,
    loss_mode: str = "k1",  # one of :data:`DISTILLATION_MODES`
    **options: Any,
) -> Tensor:
    """Return advantages ``[B, T]`` without gradient: minus the distance from the teacher at each token, 0 outside the mask.

    With ``k1``, ``log p - log q`` of the sampled token, this is the gradient of the reverse KL of that token (Lu 2025,
    "On-Policy Distillation", https://thinkingmachines.ai/blog/on-policy-distillation). Pass them to a policy loss.
    """
    student, teacher = _inside(student_log_probs.detach(), teacher_log_probs, response_mask)
    return where_mask(-distillation_token_loss(student, teacher, loss_mode, **options), response_mask)


def _inside(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if student.shape != teacher.shape or student.shape[:2] != mask.shape:
        shapes = [tuple(x.shape) for x in (student, teacher, mask)]
        raise ValueError(f"shapes of student log-probs, teacher log-probs and response_mask do not match: {shapes}")
    wider = mask if student.dim() == mask.dim() else mask[..., None]
    return where_mask(student, wider), where_mask(teacher, wider)


def _check_clamps(log_prob_min_clamp: float | None, loss_max_clamp: float | None) -> None:
    if log_prob_min_clamp is not None and log_prob_min_clamp >= 0:
        raise ConfigError(
            f"log_prob_min_clamp={log_prob_min_clamp} must be negative: it is a log-probability",
            fix="log_prob_min_clamp=-10",
            where="log_prob_min_clamp",
        )
    if loss_max_clamp is not None and loss_max_clamp <= 0:
        raise ConfigError(
            f"loss_max_clamp={loss_max_clamp} must be positive: token losses are limited to +- this",
            fix="loss_max_clamp=10",
            where="loss_max_clamp",
        )

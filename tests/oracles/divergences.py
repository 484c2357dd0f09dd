"""KL estimates, divergences and distillation losses again, in plain Python, a token at a time."""

from __future__ import annotations

import math


def estimate(new: float, ref: float, kind: str) -> float:
    """KL of the policy to the reference, from the log-probs of one token."""
    d = new - ref
    gap = min(max(-d, -20.0), 20.0)
    return {
        "k1": d,
        "kl": d,
        "abs": abs(d),
        "k2": d * d / 2,
        "mse": d * d / 2,
        "k3": min(math.expm1(gap) - gap, 10.0),
        "low_var_kl": min(math.expm1(gap) - gap, 10.0),
    }[kind]


def normalize(logits: list[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    return [z - total for z in logits]


def kl(log_p: list[float], log_q: list[float], floor: float = -1e4) -> float:
    """``sum p (log p - log q)``; what p never does costs nothing, what q never does counts as ``floor``."""
    return math.fsum(
        math.exp(max(a, floor)) * (max(a, floor) - max(b, floor)) for a, b in zip(log_p, log_q, strict=True)
    )


def mixture(log_p: list[float], log_q: list[float], beta: float) -> list[float]:
    probs = [beta * math.exp(a) + (1 - beta) * math.exp(b) for a, b in zip(log_p, log_q, strict=True)]
    return [math.log(p) if p > 0 else -math.inf for p in probs]


def divergence(
    student: list[float], teacher: list[float], kind: str, beta: float, tail: bool = False, floor: float = -1e4
) -> float:
    if tail:
        student, teacher = with_tail(student), with_tail(teacher)
    student, teacher = [max(x, floor) for x in student], [max(x, floor) for x in teacher]
    if kind == "forward_kl":
        return kl(teacher, student, floor)
    if kind == "reverse_kl":
        return kl(student, teacher, floor)
    middle = mixture(teacher, student, beta)
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def with_tail(log_probs: list[float]) -> list[float]:
    rest = 1 - math.fsum(math.exp(x) for x in log_probs)
    return [*log_probs, math.log(max(rest, 2.220446049250313e-16))]


def token_loss(
    student: list[float],
    teacher: list[float],
    loss_mode: str,
    *,
    beta: float = 0.5,
    tail_bucket: bool = True,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
) -> float:
    """``student`` and ``teacher`` hold one number for the estimators, a distribution or the top k otherwise."""
    floor = -1e4 if log_prob_min_clamp is None else log_prob_min_clamp
    kind = loss_mode.removesuffix("_topk")
    if kind in ("forward_kl", "reverse_kl", "jsd"):
        bucket = tail_bucket and loss_mode.endswith("_topk")
        loss = divergence(student, teacher, kind, beta, bucket, floor)
        loss = loss if tail_bucket else max(loss, 0.0)
    else:
        loss = estimate(max(student[0], floor), max(teacher[0], floor), kind.removesuffix("+"))
    return loss if loss_max_clamp is None else min(max(loss, -loss_max_clamp), loss_max_clamp)

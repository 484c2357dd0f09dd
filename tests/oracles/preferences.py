"""Preference losses and Bradley-Terry again: plain Python, a pair at a time, from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable

Matrix = list[list[float]]
Mask = list[list[int]]


def compact(matrix: Matrix, mask: Mask) -> list[list[float]]:
    return [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(matrix, mask, strict=True)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x - math.exp(x)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def smoothed(x: float, epsilon: float) -> float:
    return -(1 - epsilon) * log_sigmoid(x) - epsilon * log_sigmoid(-x)


Pair = tuple[float, float, float]
"""loss, implicit reward of the chosen response, of the rejected one"""


def dpo(c: list, rc: list, r: list, rr: list, beta: float = 0.1, label_smoothing: float = 0.0) -> Pair:
    better, worse = sum(c) - sum(rc), sum(r) - sum(rr)
    return smoothed(beta * (better - worse), label_smoothing), beta * better, beta * worse


def robust(c: list, rc: list, r: list, rr: list, beta: float = 0.1, label_smoothing: float = 0.1) -> Pair:
    better, worse = sum(c) - sum(rc), sum(r) - sum(rr)
    x, e = beta * (better - worse), label_smoothing
    right, wrong = -log_sigmoid(x), -log_sigmoid(-x)
    return ((1 - e) * right - e * wrong) / (1 - 2 * e), beta * better, beta * worse


def hinge(c: list, rc: list, r: list, rr: list, beta: float = 0.1) -> Pair:
    better, worse = sum(c) - sum(rc), sum(r) - sum(rr)
    return max(0.0, 1 - beta * (better - worse)), beta * better, beta * worse


def ipo(c: list, rc: list, r: list, rr: list, beta: float = 0.1, average_log_prob: bool = False) -> Pair:
    better, worse = sum(c) - sum(rc), sum(r) - sum(rr)
    if average_log_prob:
        better, worse = better / len(c), worse / len(r)
    return (better - worse - 0.5 / beta) ** 2, beta * better, beta * worse


def sppo(c: list, rc: list, r: list, rr: list, beta: float = 0.001) -> Pair:
    better, worse = sum(c) - sum(rc), sum(r) - sum(rr)
    eta = 1 / beta
    return (better - eta * (1 - 0.5)) ** 2 + (worse - eta * (0 - 0.5)) ** 2, beta * better, beta * worse


def orpo(c: list, rc: list, r: list, rr: list, beta: float = 0.1) -> Pair:
    def odds(x: float) -> float:
        x = min(x, -1e-6)
        return x - math.log(-math.expm1(x))

    better, worse = mean(c), mean(r)
    return -better - beta * log_sigmoid(odds(better) - odds(worse)), beta * better, beta * worse


def simpo(
    c: list, rc: list, r: list, rr: list, beta: float = 2.0, simpo_gamma: float = 1.0, label_smoothing: float = 0.0
) -> Pair:
    better, worse = beta * mean(c), beta * mean(r)
    return smoothed(better - worse - simpo_gamma, label_smoothing), better, worse


def cpo(
    c: list, rc: list, r: list, rr: list, beta: float = 0.1, cpo_alpha: float = 1.0, label_smoothing: float = 0.0
) -> Pair:
    better, worse = beta * sum(c), beta * sum(r)
    return smoothed(better - worse, label_smoothing) - cpo_alpha * mean(c), better, worse


PAIRED: dict[str, Callable[..., Pair]] = {
    "dpo": dpo, "sigmoid": dpo, "robust": robust, "robust_dpo": robust, "hinge": hinge, "ipo": ipo, "sppo": sppo,
    "sppo_hard": sppo, "orpo": orpo, "simpo": simpo, "cpo": cpo,
}  # fmt: skip


def right(gap: float) -> float:
    return 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0


def pair_loss(
    name: str, log_probs: Matrix, ref: Matrix, mask: Mask, labels: list[bool], pair_ids: list, **options: float
) -> tuple[float, dict[str, float]]:
    rows, refs = compact(log_probs, mask), compact(ref, mask)
    results, sums = [], []
    for pair in dict.fromkeys(pair_ids):
        members = [row for row in range(len(rows)) if pair_ids[row] == pair]
        chosen, rejected = sorted(members, key=lambda row: not labels[row])
        if rows[chosen] and rows[rejected]:
            results.append(PAIRED[name](rows[chosen], refs[chosen], rows[rejected], refs[rejected], **options))
            sums.append((sum(rows[chosen]), sum(rows[rejected])))
    return mean([loss for loss, _, _ in results]), {
        "rewards/chosen": mean([c for _, c, _ in results]),
        "rewards/rejected": mean([r for _, _, r in results]),
        "rewards/margins": mean([c - r for _, c, r in results]),
        "logps/chosen": mean([c for c, _ in sums]),
        "logps/rejected": mean([r for _, r in sums]),
    }


def kto(
    log_probs: Matrix,
    ref: Matrix,
    mask: Mask,
    labels: list[bool],
    kl: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[float, dict[str, float]]:
    losses, good, bad, hits = [], [], [], []
    for row, base, label in zip(compact(log_probs, mask), compact(ref, mask), labels, strict=True):
        if not row:
            continue
        ratio = sum(row) - sum(base)
        if label:
            losses.append(desirable_weight * (1 - sigmoid(beta * (ratio - kl))))
            good.append(beta * ratio)
        else:
            losses.append(undesirable_weight * (1 - sigmoid(beta * (kl - ratio))))
            bad.append(beta * ratio)
        hits.append(right(ratio - kl if label else kl - ratio))
    return mean(losses), {
        "rewards/chosen": mean(good),
        "rewards/rejected": mean(bad),
        "rewards/accuracies": mean(hits),
    }


def kto_kl(log_probs: Matrix, ref: Matrix, mask: Mask) -> float:
    gaps = [sum(a) - sum(b) for a, b in zip(compact(log_probs, mask), compact(ref, mask), strict=True) if a]
    return max(0.0, mean(gaps))


def bradley_terry(chosen: list[float], rejected: list[float], margin: list[float], centering: float) -> float:
    pairs = zip(chosen, rejected, margin, strict=True)
    return mean([-log_sigmoid(c - r - m) + centering * (c + r) ** 2 for c, r, m in pairs])

"""The slow golden path: every formula of ``hone.algorithms`` again, in plain Python, a token at a time, from the papers.

Matrices are lists of rows; what stands where the mask is 0 is never looked at.
"""

from __future__ import annotations

import math
import statistics

Matrix = list[list[float]]
Mask = list[list[int]]


def selected(matrix: Matrix, mask: Mask) -> list[float]:
    return [x for row, keep in zip(matrix, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def scatter(values: list[list[float]], mask: Mask) -> Matrix:
    """Values of the selected tokens of each row, back in place; 0 elsewhere."""
    result = []
    for row, keep in zip(values, mask, strict=True):
        source = iter(row)
        result.append([next(source) if m else 0.0 for m in keep])
    return result


def compact(matrix: Matrix, mask: Mask) -> list[list[float]]:
    return [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(matrix, mask, strict=True)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def variance(values: list[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


# -------------------------------------------------------------------------------------------------------- aggregation


def aggregate(loss: Matrix, mask: Mask, mode: str, loss_scale_factor: float = 1.0) -> float:
    rows = [row for row in compact(loss, mask) if row]
    if not rows:
        return 0.0
    tokens = [x for row in rows for x in row]
    return {
        "token-mean": lambda: mean(tokens),
        "token-sum": lambda: math.fsum(tokens),
        "seq-mean-token-sum": lambda: mean([math.fsum(row) for row in rows]),
        "seq-mean-token-sum-norm": lambda: mean([math.fsum(row) / loss_scale_factor for row in rows]),
        "seq-mean-token-mean": lambda: mean([mean(row) for row in rows]),
    }[mode]()


# -------------------------------------------------------------------------------------------------------------- losses


def value(new: float, target: float, old: float, cliprange: float) -> tuple[float, dict[str, float]]:
    near = min(max(new, old - cliprange), old + cliprange)
    free, clipped = (new - target) ** 2, (near - target) ** 2
    return 0.5 * max(free, clipped), {"critic/vf_clipfrac": float(clipped > free), "critic/vpred_mean": new}


# -------------------------------------------------------------------------------------------------------------- logits


def log_prob(logits: list[float], target: int, temperature: float) -> float:
    scaled = [z / temperature for z in logits]
    top = max(scaled)
    return scaled[target] - top - math.log(math.fsum(math.exp(z - top) for z in scaled))


def entropy(logits: list[float], temperature: float) -> float:
    logs = [log_prob(logits, j, temperature) for j in range(len(logits))]
    return -math.fsum(math.exp(x) * x for x in logs)

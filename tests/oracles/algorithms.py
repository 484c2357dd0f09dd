"""The slow golden path: every formula of ``hone.algorithms`` again, in plain Python, a token at a time, from the papers.

Matrices are lists of rows; what stands where the mask is 0 is never looked at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

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


# --------------------------------------------------------------------------------------------------------- advantages


def grpo(
    rewards: Matrix, mask: Mask, *, group_ids: list, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> tuple[Matrix, Matrix]:
    rows = compact(rewards, mask)
    scores = [math.fsum(row) for row in rows]
    advantages = []
    for i, row in enumerate(rows):
        group = [scores[j] for j in range(len(rows)) if group_ids[j] == group_ids[i] and rows[j]]
        center, spread = (mean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
        advantage = scores[i] - center
        if norm_adv_by_std_in_grpo:
            advantage /= spread + epsilon
        advantages.append([advantage] * len(row))
    result = scatter(advantages, mask)
    return result, result


def gae(rewards: Matrix, mask: Mask, *, values: Matrix, gamma: float = 1.0, lam: float = 1.0) -> tuple[Matrix, Matrix]:
    raw, returns = [], []
    for r, v in zip(compact(rewards, mask), compact(values, mask), strict=True):
        after = [*v[1:], 0.0]
        delta = [r[t] + gamma * after[t] - v[t] for t in range(len(r))]
        a = [math.fsum((gamma * lam) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))]
        raw.append(a)
        returns.append([x + y for x, y in zip(a, v, strict=True)])
    flat = [x for row in raw for x in row]
    center, scale = mean(flat), math.sqrt(variance(flat) + 1e-8)
    return scatter([[(x - center) / scale for x in row] for row in raw], mask), scatter(returns, mask)


ESTIMATORS: dict[str, Callable] = {"grpo": grpo, "grpo_vectorized": grpo, "gae": gae}


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


def vanilla(
    old: float,
    new: float,
    advantage: float,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[float, dict[str, float]]:
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    free = -advantage * ratio
    bounded = -advantage * min(max(ratio, 1 - clip_ratio_low), 1 + clip_ratio_high)
    loss = max(free, bounded)
    ceiling = -advantage * clip_ratio_c
    lower = advantage < 0 and loss > ceiling
    statistics = {
        "actor/ppo_kl": old - new,
        "actor/ratio/mean": ratio,
        "actor/pg_clipfrac": float(bounded > free),
        "actor/pg_clipfrac_lower": float(lower),
    }
    return min(loss, ceiling) if advantage < 0 else loss, statistics


POLICY_LOSSES: dict[str, Callable] = {"vanilla": vanilla}


def value(new: float, target: float, old: float, cliprange: float) -> tuple[float, dict[str, float]]:
    near = min(max(new, old - cliprange), old + cliprange)
    free, clipped = (new - target) ** 2, (near - target) ** 2
    return 0.5 * max(free, clipped), {"critic/vf_clipfrac": float(clipped > free), "critic/vpred_mean": new}


# ------------------------------------------------------------------------------------------------------------------ KL


def kl(new: float, ref: float, kind: str) -> float:
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


# -------------------------------------------------------------------------------------------------------------- logits


def log_prob(logits: list[float], target: int, temperature: float) -> float:
    scaled = [z / temperature for z in logits]
    top = max(scaled)
    return scaled[target] - top - math.log(math.fsum(math.exp(z - top) for z in scaled))


def entropy(logits: list[float], temperature: float) -> float:
    logs = [log_prob(logits, j, temperature) for j in range(len(logits))]
    return -math.fsum(math.exp(x) * x for x in logs)

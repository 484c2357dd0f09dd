"""Rollout correction, PF-PPO weights and the overlong penalty again, in plain Python, a token at a time.

Matrices are lists of rows; what stands where the mask is 0 is never looked at. Thresholds come parsed: the grammar of
the configuration is not the oracle's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Matrix = list[list[float]]
Mask = list[list[int]]


@dataclass
class Options:
    level: str | None = None
    low: float | None = None
    high: float = 2.0
    normalize: bool = False
    rejections: list[tuple[str, float | None, float]] = field(default_factory=list)
    """(option, lower bound of the ratio for k1, upper bound of the ratio for k1 or of the statistic)."""
    veto: float | None = None


def clip(x: float, limit: float = 20.0) -> float:
    return min(max(x, -limit), limit)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: list[float]) -> float:
    center = mean(values)
    return math.sqrt(math.fsum((x - center) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def share(conditions: list[bool]) -> float:
    return mean([float(c) for c in conditions])


def largest(values: list[float]) -> float:
    return max(values) if values else 0.0


def smallest(values: list[float]) -> float:
    return min(values) if values else 0.0


def log_ratios(old: Matrix, rollout: Matrix, mask: Mask) -> list[dict[int, float]]:
    """Per row: position -> log-ratio of the selected tokens."""
    return [{t: old[i][t] - rollout[i][t] for t in range(len(mask[i])) if mask[i][t]} for i in range(len(mask))]


def k(log_ratio: float, kind: str) -> float:
    d = clip(log_ratio)
    return {"k1": -d, "k2": d * d / 2, "k3": math.expm1(d) - d}[kind]


def kpop(old: float, rollout: float) -> float:
    """The larger KL of the two-way choices "this token, or any other" of the policies, in either direction."""
    p, q = (min(max(math.exp(min(x, 0.0)), 1e-6), 1 - 1e-6) for x in (old, rollout))
    there = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    back = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return max(there, back)


def statistics_of(row: dict[int, float], option: str, old: list[float], rollout: list[float]) -> dict[int, float]:
    """What a rejection option compares with its threshold, for every selected token of a row."""
    reduction, _, kind = option.rpartition("_")
    values = {t: kpop(old[t], rollout[t]) if kind == "kpop" else k(d, kind) for t, d in row.items()}
    if reduction == "token" or not row:
        return values
    whole = {"seq_sum": math.fsum, "seq_mean": lambda v: mean(list(v)), "seq_max": max}[reduction](values.values())
    return dict.fromkeys(values, whole)


def allowed(value: float, option: str, low: float | None, high: float) -> tuple[bool, bool]:
    """Is the value too high, is it too low."""
    if option.endswith("k1"):
        lower = 1 / high if low is None else low
        # k1 is minus the log-ratio: the upper bound of the ratio is the lower bound of k1
        return (lower > 0 and value > -math.log(lower)), value < -math.log(high)
    return value > high, False


def by_unit(rows: list[dict[int, float]], of_tokens: bool) -> list[float]:
    """Values of all tokens, or one of each row that has any."""
    if of_tokens:
        return [x for row in rows for x in row.values()]
    return [next(iter(row.values())) for row in rows if row]


def correction(old: Matrix, rollout: Matrix, mask: Mask, o: Options) -> tuple[Matrix | None, Mask, dict[str, float]]:
    rows = log_ratios(old, rollout, mask)
    metrics = diagnostics(old, rollout, mask)
    kept = [set(row) for row in rows]

    for option, low, high in o.rejections:
        values = [statistics_of(row, option, old[i], rollout[i]) for i, row in enumerate(rows)]
        tests = [{t: allowed(v, option, low, high) for t, v in row.items()} for row in values]
        passing = [{t for t, (above, below) in row.items() if not above and not below} for row in tests]
        units = by_unit(values, option.startswith("token"))
        verdicts = by_unit(tests, option.startswith("token"))
        name = f"rollout_rs_{option}"
        metrics |= {
            f"{name}_mean": mean(units),
            f"{name}_std": deviation(units),
            f"{name}_max": largest(units),
            f"{name}_min": smallest(units),
            f"{name}_fraction_high": share([above for above, _ in verdicts]),
            **lost(name, rows, passing),
        }
        if option.endswith("k1"):
            metrics[f"{name}_fraction_low"] = share([below for _, below in verdicts])
        kept = [a & b for a, b in zip(kept, passing, strict=True)]
    if o.rejections:
        metrics |= lost("rollout_rs", rows, kept)

    if o.veto is not None:
        bad = [[d < math.log(o.veto) for d in row.values()] for row in rows]
        metrics["rollout_is_catastrophic_token_fraction"] = share([x for row in bad for x in row])
        metrics["rollout_is_veto_fraction"] = share([any(row) for row in bad if row])
        kept = [set() if any(row) else keep for row, keep in zip(bad, kept, strict=True)]

    weights = None
    if o.level is not None:
        ratios = [ratio_of(row, o.level) for row in rows]
        bounded = [{t: bound(r, o.low, o.high) for t, r in row.items()} for row in ratios]
        metrics |= weight_metrics(ratios, bounded, o)
        if o.normalize:
            left = [{t: w for t, w in row.items() if t in keep} for row, keep in zip(bounded, kept, strict=True)]
            center = mean(by_unit(left, o.level == "token"))
            factor = center if center > 1e-8 else 1.0
            metrics["rollout_is_batch_norm_factor"] = factor
            bounded = [{t: w / factor for t, w in row.items()} for row in bounded]
        weights = [[bounded[i][t] if t in kept[i] else 0.0 for t in range(len(mask[i]))] for i in range(len(mask))]
    new_mask = [[int(t in kept[i]) for t in range(len(mask[i]))] for i in range(len(mask))]
    return weights, new_mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def lost(name: str, before: list[dict[int, float]], after: list[set[int]]) -> dict[str, float]:
    flags = [[t not in keep for t in row] for row, keep in zip(before, after, strict=True)]
    return {
        f"{name}_masked_fraction": share([x for row in flags for x in row]),
        f"{name}_seq_masked_fraction": share([any(row) for row in flags if row]),
    }


def ratio_of(row: dict[int, float], level: str) -> dict[int, float]:
    if level == "token" or not row:
        return {t: math.exp(clip(d)) for t, d in row.items()}
    total = math.fsum(row.values())
    return dict.fromkeys(row, math.exp(clip(total if level == "sequence" else total / len(row))))


def bound(ratio: float, low: float | None, high: float) -> float:
    if low is None:
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


def weight_metrics(ratios: list[dict], weights: list[dict], o: Options) -> dict[str, float]:
    low = 1 / o.high if o.low is None else o.low
    of_tokens = o.level == "token"
    r, w = by_unit(ratios, of_tokens), by_unit(weights, of_tokens)
    row_r = [mean(list(row.values())) for row in ratios if row]
    row_w = [mean(list(row.values())) for row in weights if row]
    square = mean([x * x for x in w])
    metrics = {
        "mean": mean(w),
        "std": deviation(w),
        "max": largest(r),
        "min": smallest(r),
        "ratio_fraction_high": share([x > o.high for x in r]),
        "ratio_fraction_low": share([x < low for x in r]),
        "eff_sample_size": mean(w) ** 2 / square if square else 0.0,
        "seq_mean": mean(row_w),
        "seq_std": deviation(row_w),
        "seq_max": largest(row_r),
        "seq_min": smallest(row_r),
        "seq_max_deviation": largest([abs(x - 1) for x in row_r]),
        "seq_fraction_high": share([x > o.high for x in row_r]),
        "seq_fraction_low": share([x < low for x in row_r]),
    }
    if o.low is not None:
        metrics["oob_ratio"] = share([not o.low <= x <= o.high for x in r])
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def diagnostics(old: Matrix, rollout: Matrix, mask: Mask) -> dict[str, float]:
    rows = [list(row.values()) for row in log_ratios(old, rollout, mask)]
    gaps = [d for row in rows for d in row]
    ordered = sorted(gaps)

    def perplexity(matrix: Matrix) -> list[float]:
        selected = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(matrix, mask, strict=True)]
        return [-mean(row) for row in selected if row]

    def quantile(q: float) -> float:
        return ordered[max(math.ceil(q * len(ordered)), 1) - 1] if ordered else 0.0

    training, sampling = perplexity(old), perplexity(rollout)
    difference = [a - b for a, b in zip(training, sampling, strict=True)]
    return {
        "kl": mean([-d for d in gaps]),
        "k3_kl": mean([k(d, "k3") for d in gaps]),
        "chi2_token": mean([math.expm1(2 * clip(d)) for d in gaps]),
        "chi2_seq": mean([math.expm1(2 * clip(math.fsum(row))) for row in rows if row]),
        "ratio_outside": mean([float(not 0.5 <= math.exp(clip(d)) <= 2) for d in gaps]),
        "log_ratio_abs_max": largest([abs(d) for d in gaps]),
        "log_ratio_q01": quantile(0.01),
        "log_ratio_q50": quantile(0.5),
        "log_ratio_q99": quantile(0.99),
        "training_log_ppl": mean(training),
        "training_ppl": mean([math.exp(x) for x in training]),
        "rollout_log_ppl": mean(sampling),
        "rollout_ppl": mean([math.exp(x) for x in sampling]),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "log_ppl_diff_max": largest(difference),
        "log_ppl_diff_min": smallest(difference),
        "ppl_ratio": mean([math.exp(clip(x)) for x in difference]),
    }


# ------------------------------------------------------------------------------------------- PF-PPO, overlong shaping


def resampling_weights(scores: list[float], method: str, weight_pow: float) -> list[float]:
    """Probabilities of a draw."""
    if method == "pow":
        weights = [abs(s) ** weight_pow for s in scores]
    elif method == "max_min":
        weights = [float(s in (max(scores), min(scores))) for s in scores]
    else:
        weights = [0.4 if s == max(scores) else 0.1 for s in scores]
    total = math.fsum(weights)
    return [w / total for w in weights] if total else [1 / len(scores)] * len(scores)


def overlong_penalty(length: int, max_resp_len: int, buffer_len: int, penalty_factor: float) -> float:
    start = max_resp_len - buffer_len
    if length <= start:
        return 0.0
    if length <= max_resp_len:
        return -penalty_factor * (length - start) / buffer_len
    return -penalty_factor

"""The slow golden path of the policy losses, in plain Python, a token at a time, from the papers.

A batch is a list of rows; a row holds the selected tokens of a sequence only. Every loss is a function of ``old``,
``new``, ``frozen`` and ``advantages``: ``frozen`` has the values of ``new`` and stands wherever the method takes the policy
as a constant, so that finite differences in ``new`` give the gradient that the method means. It returns a row of
``(loss, statistics)`` for each row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from oracles.corrections import kpop

Rows = list[list[float]]
Result = list[list[tuple[float, dict[str, float]]]]
TokenFormula = Callable[[float, float, float, float], tuple[float, dict[str, float]]]


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(old: float, new: float) -> float:
    return math.exp(clamp(new - old, -20.0, 20.0))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def stats(old: float, new: float, r: float, **more: float) -> dict[str, float]:
    named = {"ppo_kl": old - new, "ratio/mean": r, **more}
    return {f"actor/{name}": float(value) for name, value in named.items()}


def by_token(formula: TokenFormula, *columns: Rows) -> Result:
    return [[formula(*token) for token in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]


def surrogate(r: float, a: float, low: float, high: float) -> tuple[float, bool]:
    free, clipped = -a * r, -a * clamp(r, 1 - low, 1 + high)
    return max(free, clipped), clipped > free


# ---------------------------------------------------------------------------------------------------- token by token


def vanilla(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    def token(o, n, f, a):
        r = ratio(o, n)
        loss, clipped = surrogate(r, a, clip_ratio_low, clip_ratio_high)
        lower = a < 0 and loss > -a * clip_ratio_c
        loss = -a * clip_ratio_c if lower else loss
        return loss, stats(o, n, r, pg_clipfrac=clipped, pg_clipfrac_lower=lower)

    return by_token(token, old, new, frozen, advantages)


def sapo(old, new, frozen, advantages, *, tau_pos=1.0, tau_neg=1.05):
    def token(o, n, f, a):
        r, tau = ratio(o, n), tau_pos if a > 0 else tau_neg
        x = tau * (r - 1)
        gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
        return -a * 4 / tau * gate, stats(o, n, r)

    return by_token(token, old, new, frozen, advantages)


def gpg(old, new, frozen, advantages):
    return by_token(lambda o, n, f, a: (-a * n, stats(o, n, ratio(o, n))), old, new, frozen, advantages)


def cispo(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2):
    def token(o, n, f, a):
        r = ratio(o, f)
        weight = clamp(r, 1 - clip_ratio_low, 1 + clip_ratio_high)
        return -weight * a * n, stats(o, n, r, pg_clipfrac=weight != r)

    return by_token(token, old, new, frozen, advantages)


def dro(old, new, frozen, advantages, *, dro_beta=0.05):
    def token(o, n, f, a):
        squared = (n - o) ** 2
        return -(a * n - dro_beta / 2 * squared), stats(o, n, ratio(o, n), squared_log_ratio=squared)

    return by_token(token, old, new, frozen, advantages)


def dppo_token(o, n, f, a, valid, cap):
    r = ratio(o, f)
    loss = -a * min(r, cap) * n if valid else 0.0
    return loss, stats(o, n, r, pg_clipfrac=not valid, pg_clipfrac_lower=valid and r > cap)


def dppo_tv(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    def token(o, n, f, a):
        change = math.exp(min(f, 0.0)) - math.exp(min(o, 0.0))
        valid = change <= clip_ratio_high if a > 0 else change >= -clip_ratio_low if a < 0 else True
        return dppo_token(o, n, f, a, valid, clip_ratio_c)

    return by_token(token, old, new, frozen, advantages)


def dppo_kl(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    def token(o, n, f, a):
        before, after = min(o, 0.0), min(f, 0.0)
        q_before, q_after = (max(-math.expm1(x), 1e-8) for x in (before, after))
        kl = math.exp(before) * (before - after) + q_before * math.log(q_before / q_after)
        valid = True
        if a > 0:
            valid = kl <= clip_ratio_high or after <= before
        if a < 0:
            valid = kl <= clip_ratio_low or after >= before
        return dppo_token(o, n, f, a, valid, clip_ratio_c)

    return by_token(token, old, new, frozen, advantages)


# ----------------------------------------------------------------------------------------------- sequence by sequence


def gspo(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2):
    result = []
    for o, n, f, a in zip(old, new, frozen, advantages, strict=True):
        level = mean([y - x for x, y in zip(o, f, strict=True)])
        row = []
        for t in range(len(o)):
            r = math.exp(clamp(level + (n[t] - f[t]), -20.0, 20.0))  # GSPO-token: the gradient stays with the token
            loss, clipped = surrogate(r, a[t], clip_ratio_low, clip_ratio_high)
            row.append((loss, stats(o[t], n[t], r, pg_clipfrac=clipped)))
        result.append(row)
    return result


def geo_mean(old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2):
    result = []
    for o, n, a in zip(old, new, advantages, strict=True):
        free = [clamp(y - x, -20.0, 20.0) for x, y in zip(o, n, strict=True)]
        cut = []
        for d, adv in zip(free, a, strict=True):
            sign = (adv > 0) - (adv < 0)
            cut.append(sign * min(sign * d, sign * clamp(d, -clip_ratio_low, clip_ratio_high)))
        r = math.exp(mean(cut))
        row = []
        for t, adv in enumerate(a):
            flags = {"pg_clipfrac": adv > 0 and cut[t] != free[t], "pg_clipfrac_lower": adv < 0 and cut[t] != free[t]}
            row.append((-adv * r, stats(o[t], n[t], r, **flags)))
        result.append(row)
    return result


def topr(old, new, frozen, advantages):
    result = []
    for o, n, f, a in zip(old, new, frozen, advantages, strict=True):
        taper = math.exp(min(math.fsum(y - x for x, y in zip(o, f, strict=True)), 0.0))
        row = []
        for t, adv in enumerate(a):
            weight = taper if adv < 0 else 1.0
            row.append((-weight * adv * n[t], stats(o[t], n[t], ratio(o[t], f[t]), topr_weight=weight)))
        result.append(row)
    return result


def vespo(
    old, new, frozen, advantages, *, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0
):
    result = []
    for o, n, f, a in zip(old, new, frozen, advantages, strict=True):
        w = math.exp(
            clamp(math.fsum(clamp(y - x, -20.0, 20.0) for x, y in zip(o, f, strict=True)), math.log(1e-8), 20.0)
        )
        row = []
        for t, adv in enumerate(a):
            k, decay = (vespo_k_pos, vespo_lambda_pos) if adv >= 0 else (vespo_k_neg, vespo_lambda_neg)
            weight = w**k * math.exp(max(decay * (1 - w), -745.0))
            row.append((-weight * adv * n[t], stats(o[t], n[t], ratio(o[t], f[t]), vespo_weight=weight)))
        result.append(row)
    return result


# ---------------------------------------------------------------------------------------------------- across the batch


def flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]


def chosen_like(rows: Rows, chosen: set[int]) -> list[list[bool]]:
    numbers = iter(range(len(flat(rows))))
    return [[next(numbers) in chosen for _ in row] for row in rows]


def in_float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def signed64(x: int) -> int:
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def token_hash(*values: float) -> int:
    multiplier, mixed = -7046029254386353131, 0
    for value in values:
        bits = struct.unpack("<i", struct.pack("<f", value + 0.0))[0]
        mixed = signed64((mixed ^ bits) * multiplier)
        mixed ^= mixed >> 32
    return signed64(mixed * multiplier) & (2**63 - 1)


def contributions(log_probs: list[float], advantages: list[float]) -> list[float]:
    p, a = in_float32(mean(log_probs)), in_float32(mean(advantages))
    return [(x - p) * (y - a) for x, y in zip(log_probs, advantages, strict=True)]


def drawn(candidates: list[int], count: int, hashes: list[int]) -> set[int]:
    if count <= 0:
        return set()
    last = sorted(hashes[i] for i in candidates)[: count or 1][-1] if candidates else 0
    return {i for i in candidates if hashes[i] <= last}


def share_of(count: int, share: float) -> int:
    return max(int(share * count), 1)


def clip_cov(
    old, new, frozen, advantages, *, clip_ratio_low=0.2, clip_ratio_high=0.2,
    clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0,
):  # fmt: skip
    o, f, a = flat(old), flat(frozen), flat(advantages)
    moves = contributions(f, a)
    hashes = [token_hash(*values) for values in zip(o, f, a, strict=True)]
    clips = [surrogate(ratio(x, y), z, clip_ratio_low, clip_ratio_high)[1] for x, y, z in zip(o, f, a, strict=True)]
    candidates = [i for i in range(len(o)) if clip_cov_lb < moves[i] < clip_cov_ub and not clips[i]]
    held = chosen_like(old, drawn(candidates, share_of(len(o), clip_cov_ratio), hashes))

    def token(x, y, z, h):
        r = ratio(x, y)
        loss, clipped = surrogate(r, z, clip_ratio_low, clip_ratio_high)
        return 0.0 if h else loss, stats(x, y, r, pg_clipfrac=clipped, pg_cov_fraction=h)

    return by_token(token, old, new, advantages, held)


def kl_cov(old, new, frozen, advantages, *, kl_cov_ratio=2e-4, ppo_kl_coef=0.1):
    o, f, a = flat(old), flat(frozen), flat(advantages)
    moves = contributions(f, a)
    hashes = [token_hash(*values) for values in zip(o, f, a, strict=True)]
    order = sorted(range(len(o)), key=lambda i: (-moves[i], hashes[i]))
    count = min(share_of(len(o), kl_cov_ratio), len(o))
    last = (moves[order[count - 1]], hashes[order[count - 1]]) if count else (math.inf, 0)
    held = chosen_like(
        old, {i for i in range(len(o)) if moves[i] > last[0] or (moves[i] == last[0] and hashes[i] <= last[1])}
    )

    def token(x, y, z, h):
        r = ratio(x, y)
        return -z * r + (ppo_kl_coef * abs(y - x) if h else 0.0), stats(x, y, r, pg_cov_fraction=h)

    return by_token(token, old, new, advantages, held)


def m2po(old, new, frozen, advantages, *, m2_threshold=0.04):
    o, f, a = flat(old), flat(frozen), flat(advantages)
    squares = [(y - x) ** 2 for x, y in zip(o, f, strict=True)]
    trust = [i for i in range(len(o)) if (a[i] > 0 and f[i] > o[i]) or (a[i] < 0 and f[i] < o[i])]
    left = list(trust)
    while left and mean([squares[i] for i in left]) > m2_threshold:
        worst = max(squares[i] for i in left)
        left = [i for i in left if squares[i] < worst]
    held = chosen_like(old, set(trust) - set(left))

    def token(x, y, z, h):
        r = ratio(x, y)
        return 0.0 if h else -z * r, stats(x, y, r, pg_clipfrac=h, squared_log_ratio=(y - x) ** 2)

    return by_token(token, old, new, advantages, held)


# -------------------------------------------------------------------------------------------------------------- bypass


def bypass_mode(
    old, new, frozen, advantages, *, loss_type="ppo_clip", rollout_is=None, rollout_is_threshold=2.0, rollout_rs=None,
    rollout_rs_threshold=None, rollout_token_veto_threshold=None, clip_ratio_low=0.2, clip_ratio_high=0.2,
    clip_ratio_c=3.0,
):  # fmt: skip
    clipped = vanilla(
        old, new, frozen, advantages,
        clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c,
    )  # fmt: skip
    result = []
    for i, (o, n, f, a) in enumerate(zip(old, new, frozen, advantages, strict=True)):
        gaps = [y - x for x, y in zip(o, f, strict=True)]
        row = []
        for t, gap in enumerate(gaps):
            kept = not (rollout_token_veto_threshold and any(g < math.log(rollout_token_veto_threshold) for g in gaps))
            if rollout_rs == "seq_mean_k1":
                low, high = map(float, rollout_rs_threshold.split("_"))
                kept &= math.log(low) <= mean([clamp(g, -20, 20) for g in gaps]) <= math.log(high)
            if rollout_rs == "token_k2":
                kept &= 0.5 * clamp(gap, -20, 20) ** 2 <= rollout_rs_threshold
            if rollout_rs == "token_kpop":
                kept &= kpop(f[t], o[t]) <= rollout_rs_threshold
            level = {"token": gap, "sequence": math.fsum(gaps), "geometric": mean(gaps), None: 0.0}[rollout_is]
            weight = math.exp(clamp(level, -20, 20))
            if isinstance(rollout_is_threshold, list):
                low, high = rollout_is_threshold
                weight = weight if low <= weight <= high else 0.0
            else:
                weight = min(weight, rollout_is_threshold)
            if loss_type == "ppo_clip":
                loss, numbers = clipped[i][t]
            else:
                loss, numbers = -weight * a[t] * n[t], stats(o[t], n[t], ratio(o[t], f[t]))
                if rollout_is:
                    numbers["actor/rollout_is_weight"] = weight
            row.append((loss if kept else 0.0, numbers | {"actor/rollout_rejected": float(not kept)}))
        result.append(row)
    return result


POLICY_LOSSES: dict[str, Callable[..., Result]] = {
    function.__name__: function
    for function in (
        vanilla, sapo, gpg, cispo, dro, dppo_tv, dppo_kl, gspo, geo_mean, topr, vespo, clip_cov, kl_cov, m2po, bypass_mode,
    )
}  # fmt: skip

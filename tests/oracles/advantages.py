"""Every advantage estimator again, in plain Python, a token at a time, from the papers. See ``oracles.algorithms``.

Rows are compacted to their sampled tokens first: nothing else is a step of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from oracles.algorithms import Mask, Matrix, compact, mean, scatter, variance

Rows = list[list[float]]
Answer = tuple[Matrix, Matrix]


def others(i: int, rows: Rows, group_ids: Sequence) -> list[int]:
    """Row i and the other rows of its group that have a sampled token."""
    return [j for j in range(len(rows)) if group_ids[j] == group_ids[i] and rows[j]]


def same_on_all(values: list[float], rows: Rows, mask: Mask) -> Answer:
    result = scatter([[v] * len(row) for v, row in zip(values, rows, strict=True)], mask)
    return result, result


def std(values: list[float]) -> float:
    return math.sqrt(variance(values))


def whitened(rows: Rows) -> Rows:
    flat = [x for row in rows for x in row]
    center, scale = mean(flat), math.sqrt(variance(flat) + 1e-8)
    return [[(x - center) / scale for x in row] for row in rows]


def to_come(row: list[float], gamma: float = 1.0) -> list[float]:
    return [math.fsum(gamma**k * row[t + k] for k in range(len(row) - t)) for t in range(len(row))]


def group_scores(rewards: Matrix, mask: Mask, group_ids: Sequence) -> tuple[Rows, list[float], list[list[float]]]:
    """Compacted rows, their scores, and for each row the scores of its group."""
    rows = compact(rewards, mask)
    scores = [math.fsum(row) for row in rows]
    return rows, scores, [[scores[j] for j in others(i, rows, group_ids)] for i in range(len(rows))]


def against_group(score: float, group: list[float], by_std: bool, epsilon: float) -> float:
    if len(group) < 2:
        return score / (1 + epsilon) if by_std else score
    return (score - mean(group)) / (std(group) + epsilon) if by_std else score - mean(group)


# --------------------------------------------------------------------------------------------------------- estimators


def gae(rewards: Matrix, mask: Mask, *, values: Matrix, gamma: float = 1.0, lam: float = 1.0) -> Answer:
    raw, returns = [], []
    for r, v in zip(compact(rewards, mask), compact(values, mask), strict=True):
        after = [*v[1:], 0.0]
        a = to_come([r[t] + gamma * after[t] - v[t] for t in range(len(r))], gamma * lam)
        raw.append(a)
        returns.append([x + y for x, y in zip(a, v, strict=True)])
    return scatter(whitened(raw), mask), scatter(returns, mask)


def grpo(
    rewards: Matrix, mask: Mask, *, group_ids: list, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> Answer:
    rows, scores, groups = group_scores(rewards, mask, group_ids)
    pairs = zip(scores, groups, strict=True)
    return same_on_all([against_group(s, g, norm_adv_by_std_in_grpo, epsilon) for s, g in pairs], rows, mask)


def grpo_passk(
    rewards: Matrix, mask: Mask, *, group_ids: list, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> Answer:
    rows, scores, groups = group_scores(rewards, mask, group_ids)
    advantages = []
    for score, group in zip(scores, groups, strict=True):
        ranked = sorted(group, reverse=True)
        lead = ranked[0] - ranked[1] if len(ranked) > 1 and score == ranked[0] else 0.0
        advantages.append(lead / (std(group) + epsilon) if norm_adv_by_std_in_grpo else lead)
    return same_on_all(advantages, rows, mask)


def rloo(rewards: Matrix, mask: Mask, *, group_ids: list) -> Answer:
    rows = compact(rewards, mask)
    scores = [math.fsum(row) for row in rows]
    advantages = [scores[i] - mean([scores[j] for j in others(i, rows, group_ids) if j != i]) for i in range(len(rows))]
    return same_on_all(advantages, rows, mask)


def prime(
    rewards: Matrix, mask: Mask, *, group_ids: list, process_rewards: Matrix, process_coef: float = 1.0
) -> Answer:
    rows, process = compact(rewards, mask), compact(process_rewards, mask)
    scores = [math.fsum(row) for row in rows]
    advantages = []
    for i, row in enumerate(process):
        rest = [j for j in others(i, rows, group_ids) if j != i]
        outcome = scores[i] - mean([scores[j] for j in rest])
        baseline = mean([mean(process[j]) for j in rest])
        advantages.append([outcome + process_coef * later for later in to_come([r - baseline for r in row])])
    return scatter(advantages, mask), scatter([[s] * len(row) for s, row in zip(scores, rows, strict=True)], mask)


def opo(rewards: Matrix, mask: Mask, *, group_ids: list) -> Answer:
    rows = compact(rewards, mask)
    advantages = []
    for i, row in enumerate(rows):
        group = others(i, rows, group_ids)
        tokens = sum(len(rows[j]) for j in group)
        baseline = math.fsum(len(rows[j]) * math.fsum(rows[j]) for j in group) / tokens if len(group) > 1 else 0.0
        advantages.append(math.fsum(row) - baseline)
    return same_on_all(advantages, rows, mask)


def gpg(rewards: Matrix, mask: Mask, *, group_ids: list, f_norm: float = 1.0, gpg_count: str = "scores") -> Answer:
    rows, scores, groups = group_scores(rewards, mask, group_ids)
    advantages = [against_group(s, g, False, 0.0) for s, g in zip(scores, groups, strict=True)]
    present = [i for i, row in enumerate(rows) if row]
    if gpg_count == "scores":
        counted = [i for i in present if scores[i] != 0]
    else:
        counted = [i for i in present if (len(set(groups[i])) > 1 if len(groups[i]) > 1 else scores[i] != 0)]
    alpha = len(present) / max(len(counted), 1)
    return same_on_all([alpha * a / f_norm for a in advantages], rows, mask)


def maxrl(rewards: Matrix, mask: Mask, *, group_ids: list, epsilon: float = 1e-6) -> Answer:
    rows, scores, groups = group_scores(rewards, mask, group_ids)
    advantages = [
        (s - mean(g)) / (mean([abs(x) for x in g]) + epsilon) if len(g) > 1 else s
        for s, g in zip(scores, groups, strict=True)
    ]
    return same_on_all(advantages, rows, mask)


def gdpo(
    rewards: Matrix,
    mask: Mask,
    *,
    group_ids: list,
    reward_components: dict[str, list[float]],
    gdpo_reward_keys: list[str] | None = None,
    gdpo_reward_weights: list[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Answer:
    rows, keys = compact(rewards, mask), gdpo_reward_keys or list(reward_components)
    weights = gdpo_reward_weights or [1.0] * len(keys)
    total = []
    for i in range(len(rows)):
        group = others(i, rows, group_ids)
        parts = [
            w * against_group(s[i], [s[j] for j in group], norm_adv_by_std_in_grpo, epsilon)
            for s, w in zip((reward_components[key] for key in keys), weights, strict=True)
        ]
        total.append(math.fsum(parts) if rows[i] else 0.0)
    result = scatter(whitened([[x] * len(row) for x, row in zip(total, rows, strict=True)]), mask)
    return result, result


def reinforce_plus_plus(rewards: Matrix, mask: Mask, *, gamma: float = 1.0) -> Answer:
    returns = [to_come(row, gamma) for row in compact(rewards, mask)]
    return scatter(whitened(returns), mask), scatter(returns, mask)


def reinforce_plus_plus_baseline(rewards: Matrix, mask: Mask, *, group_ids: list) -> Answer:
    rows, scores, groups = group_scores(rewards, mask, group_ids)
    advantages = [against_group(s, g, False, 0.0) for s, g in zip(scores, groups, strict=True)]
    result = scatter(whitened([[a] * len(row) for a, row in zip(advantages, rows, strict=True)]), mask)
    return result, result


def remax(rewards: Matrix, mask: Mask, *, reward_baselines: list[float]) -> Answer:
    returns = [to_come(row) for row in compact(rewards, mask)]
    advantages = [[g - b for g in row] for row, b in zip(returns, reward_baselines, strict=True)]
    return scatter(advantages, mask), scatter(returns, mask)


def optimal_token_baseline(
    rewards: Matrix,
    mask: Mask,
    *,
    group_ids: list,
    old_log_probs: Matrix,
    sum_pi_squared: Matrix,
    rollout_is_weights: Matrix | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Answer:
    returns = [to_come(row) for row in compact(rewards, mask)]
    ones = [[1.0] * len(row) for row in mask]
    columns = [compact(m, mask) for m in (old_log_probs, sum_pi_squared, rollout_is_weights or ones)]
    gathered = []
    for old, squares, rho in zip(*columns, strict=True):
        norms = [r * r * max(1 - 2 * math.exp(o) + s, 0.0) for o, s, r in zip(old, squares, rho, strict=True)]
        gathered.append([math.fsum(norms[: t + 1]) for t in range(len(norms))])
    advantages = []
    for i, row in enumerate(returns):
        group = others(i, returns, group_ids)
        longest_other = max((len(returns[j]) for j in group if j != i), default=0)
        advantages.append([])
        for t, g in enumerate(row):
            here = [j for j in group if len(returns[j]) > t]
            weight = math.fsum(gathered[j][t] for j in here)
            baseline = math.fsum(returns[j][t] * gathered[j][t] for j in here) / (weight + epsilon)
            if len(group) == 1 or (handle_zero_tail and t >= longest_other):
                baseline = 0.0
            advantages[i].append(g - baseline)
    return scatter(advantages, mask), scatter(returns, mask)


def gigpo(
    rewards: Matrix,
    mask: Mask,
    *,
    group_ids: list,
    turn_ids: Matrix,
    turn_group_ids: list[list] | None = None,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Answer:
    rows, ids = compact(rewards, mask), compact(turn_ids, mask)
    steps = []  # (row, turn, state, discounted reward to come)
    for i, (row, turn_of) in enumerate(zip(rows, ids, strict=True)):
        turns = sorted(set(turn_of))
        sums = [math.fsum(r for r, k in zip(row, turn_of, strict=True) if k == turn) for turn in turns]
        for turn, value in zip(turns, to_come(sums, gamma), strict=True):
            state = turn if turn_group_ids is None else turn_group_ids[i][int(turn)]
            steps.append((i, turn, (group_ids[i], state), value))
    worth = {}
    for i, turn, state, value in steps:
        group = [v for _, _, s, v in steps if s == state]
        alone = len(group) < 2
        worth[i, turn] = 0.0 if alone else against_group(value, group, norm_adv_by_std_in_grpo, epsilon)
    whole, _ = grpo(
        rewards, mask, group_ids=group_ids, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, epsilon=epsilon
    )
    advantages = [
        [a + step_advantage_w * worth[i, k] for a, k in zip(row, ids[i], strict=True)]
        for i, row in enumerate(compact(whole, mask))
    ]
    result = scatter(advantages, mask)
    return result, result


def _turns(rewards: Matrix, mask: Mask, turn_ids: Matrix) -> list[dict[int, float]]:
    """Rewards of the turns of each row, in order."""
    rows = []
    for row, turn_of in zip(compact(rewards, mask), compact(turn_ids, mask), strict=True):
        rows.append(
            {int(k): math.fsum(r for r, t in zip(row, turn_of, strict=True) if t == k) for k in sorted(set(turn_of))}
        )
    return rows


def turn_rloo(rewards: Matrix, mask: Mask, *, group_ids: list, turn_ids: Matrix, gamma: float = 1.0) -> Answer:
    rows = _turns(rewards, mask, turn_ids)
    returns = [dict(zip(row, to_come(list(row.values()), gamma), strict=True)) for row in rows]
    advantages, values = [], []
    for i, turn_of in enumerate(compact(turn_ids, mask)):
        others = [r for j, r in enumerate(returns) if j != i and group_ids[j] == group_ids[i] and r]
        worth = {}
        for k, value in returns[i].items():
            same = [r[k] for r in others if k in r] or [r[min(r)] for r in others] or [0.0]
            worth[k] = value - math.fsum(same) / len(same)
        advantages.append([worth[int(k)] for k in turn_of])
        values.append([returns[i][int(k)] for k in turn_of])
    return scatter(advantages, mask), scatter(values, mask)


def turn_gae(
    rewards: Matrix,
    mask: Mask,
    *,
    values: Matrix,
    turn_ids: Matrix,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Answer:
    advantages, returns = [], []
    for row, turn_of, worth in zip(
        _turns(rewards, mask, turn_ids), compact(turn_ids, mask), compact(values, mask), strict=True
    ):
        before = {k: worth[turn_of.index(k)] for k in row}
        after = [*list(before.values())[1:], 0.0]
        deltas = [r + gamma * v - before[k] for (k, r), v in zip(row.items(), after[: len(row)], strict=True)]
        of_turn = dict(zip(row, to_come(deltas, gamma * lam), strict=True))
        advantages.append([of_turn[int(k)] for k in turn_of])
        returns.append([of_turn[int(k)] + before[int(k)] for k in turn_of])
    if whiten:
        advantages = whitened(advantages)
    return scatter(advantages, mask), scatter(returns, mask)


def turn_value_by_forks(
    rewards: Matrix, mask: Mask, *, group_ids: list, turn_ids: Matrix, turn_values: list[dict], old_log_probs: Matrix
) -> Answer:
    rows = _turns(rewards, mask, turn_ids)
    earned = [math.fsum(row.values()) for row in rows]
    advantages, returns = [], []
    for i, turn_of in enumerate(compact(turn_ids, mask)):
        others = [earned[j] for j, row in enumerate(rows) if j != i and row and group_ids[j] == group_ids[i]]
        worth, low, high = [math.fsum(others) / len(others) if others else 0.0], {}, {}
        stretch: list[int] = []
        for k in rows[i]:
            if stretch and k in turn_values[i]:
                worth.append(turn_values[i][k])
                low |= dict.fromkeys(stretch, worth[-2])
                high |= dict.fromkeys(stretch, worth[-1])
                stretch = []
            stretch.append(k)
        low |= dict.fromkeys(stretch, worth[-1])
        high |= dict.fromkeys(stretch, earned[i])
        advantages.append([high[int(k)] - low[int(k)] for k in turn_of])
        returns.append([high[int(k)] for k in turn_of])
    return scatter(advantages, mask), scatter(returns, mask)


def rae(rewards: Matrix, mask: Mask, *, turn_ids: Matrix, turn_baselines: list[list]) -> Answer:
    advantages, returns = [], []
    for row, turn_of, known in zip(
        _turns(rewards, mask, turn_ids), compact(turn_ids, mask), turn_baselines, strict=True
    ):
        roles = [known[int(k)][0] for k in turn_of]
        earned = [math.fsum(r for k, r in row.items() if known[k][0] == role) for role in roles]
        advantages.append([e - known[int(k)][1] for e, k in zip(earned, turn_of, strict=True)])
        returns.append(earned)
    return scatter(advantages, mask), scatter(returns, mask)


def hierarchical_grpo(
    rewards: Matrix,
    mask: Mask,
    *,
    group_ids: list,
    turn_ids: Matrix,
    turn_roles: list[list[str]],
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Answer:
    rows, numbers = _turns(rewards, mask, turn_ids), compact(turn_ids, mask)
    earned = [
        {role: math.fsum(r for k, r in row.items() if names[k] == role) for role in {names[k] for k in row}}
        for row, names in zip(rows, turn_roles, strict=True)
    ]
    advantages, returns = [], []
    for i, (turn_of, names) in enumerate(zip(numbers, turn_roles, strict=True)):
        found = []
        for role in (names[int(k)] for k in turn_of):
            if "#" in role:
                peers = [
                    value
                    for name, value in earned[i].items()
                    if "#" in name and name[: name.index("#")] == role[: role.index("#")]
                ]
            else:
                peers = [
                    earned[j][role] for j in range(len(rows)) if group_ids[j] == group_ids[i] and role in earned[j]
                ]
            alone = len(peers) == 1
            found.append(0.0 if alone else against_group(earned[i][role], peers, norm_adv_by_std_in_grpo, epsilon))
        advantages.append(found)
        returns.append([earned[i][names[int(k)]] for k in turn_of])
    return scatter(advantages, mask), scatter(returns, mask)


ESTIMATORS: dict[str, Callable[..., Answer]] = {
    "gae": gae,
    "gdpo": gdpo,
    "gigpo": gigpo,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "hierarchical_grpo": hierarchical_grpo,
    "maxrl": maxrl,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "prime": prime,
    "rae": rae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "rloo": rloo,
    "turn_gae": turn_gae,
    "turn_rloo": turn_rloo,
    "turn_value_by_forks": turn_value_by_forks,
}
"""By the first registered name."""

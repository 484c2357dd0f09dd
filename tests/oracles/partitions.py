"""Partitions by trying everything."""

from __future__ import annotations

import itertools


def best_makespan(costs: list[float], parts: int, *, equal_count: bool = False) -> float:
    """The smallest possible sum of the heaviest part; with ``equal_count`` sizes differ by at most one."""
    low, high = len(costs) // parts, -(-len(costs) // parts)
    best = float("inf")
    for assignment in itertools.product(range(parts), repeat=len(costs)):
        sums, sizes = [0.0] * parts, [0] * parts
        for cost, part in zip(costs, assignment, strict=True):
            sums[part] += cost
            sizes[part] += 1
        if not equal_count or all(low <= size <= high for size in sizes):
            best = min(best, max(sums))
    return best


def load(rows: list[tuple[int, int, int]], pairs_per_token: float) -> tuple[int, float]:
    """Tokens and work of the given ``(group, prompt tokens, response tokens)``, counted token by token.

    Every token goes through the model once and looks at all tokens of its sequence up to itself; a prompt is there once.
    """
    tokens, pairs, seen = 0, 0, set()
    for group, prompt, response in rows:
        if group not in seen:
            seen.add(group)
            tokens += prompt
            pairs += sum(place + 1 for place in range(prompt))
        tokens += response
        pairs += sum(prompt + place + 1 for place in range(response))
    return tokens, tokens + pairs / pairs_per_token

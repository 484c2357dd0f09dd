"""Efficiency: a right answer pays for each tool call and each token of tool output.

Gamed by not working at all if cost weighs more than the answer. So the cost is bounded by half of what a right answer earns, and a wrong
answer earns nothing however cheap.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info, per_call=0.05, per_token=0.001):
    """1 for a right marked answer, less its cost, which is 0.5 at most."""
    episode = (extra_info or {}).get("episode", {})
    calls = len(episode.get("tool_calls", []))
    given = episode.get("tokens", {}).get("given", 0)
    right = solution_str.count("####") == 1 and solution_str.rpartition("####")[2].strip() == str(ground_truth)
    cost = min(0.5, per_call * calls + per_token * given)
    return {"score": right * (1 - cost), "acc": float(right), "calls": float(calls)}

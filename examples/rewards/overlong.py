"""Shaped by length: right answers lose a little with every word above a limit, down to half.

Gamed by short wrong answers if brevity pays by itself. So length is only a factor of a right answer: it can lower a reward, never make one.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info, free=20, limit=60):
    """1 for a right answer of up to ``free`` words, falling to 0.5 at ``limit`` words and beyond."""
    words = solution_str.split()
    right = bool(words) and words[-1].strip(".") == str(ground_truth) and solution_str.count("####") == 1
    right = right and words[-2:-1] == ["####"]
    excess = min(1.0, max(0.0, (len(words) - free) / (limit - free)))
    return {"score": right * (1 - 0.5 * excess), "acc": float(right), "words": float(len(words))}

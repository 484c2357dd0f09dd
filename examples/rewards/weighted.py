"""Several aims at once: outcome first, form and brevity as tie-breakers.

Weights are gamed where small terms add up: 0.4 + 0.4 + 0.4 for a wrong answer beats 1 for a right one. So the weights of all other terms
together are below the smallest difference that the outcome makes, and terms of form count for answers that were tried.
"""

import re

WEIGHTS = {"outcome": 1.0, "form": 0.2, "brief": 0.1}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Weighted sum of outcome, form and brevity; the last two need an answer of one marked number."""
    marked = re.search(r"####\s*(-?\d+)\s*$", solution_str)
    tried = marked is not None and solution_str.count("####") == 1
    terms = {
        "outcome": float(tried and marked is not None and marked[1] == str(ground_truth)),
        "form": float(tried and "<think>" in solution_str and solution_str.count("</think>") == 1),
        "brief": float(tried and len(solution_str) <= 200),
    }
    return {"score": sum(WEIGHTS[name] * value for name, value in terms.items()), "acc": terms["outcome"], **terms}

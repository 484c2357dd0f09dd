"""A number within a tolerance: `#### 3.14` for pi is right, `about 3` is not.

Gamed by listing numbers: only the text after the last marker is read, and it must be one number and nothing else.
"""

import math
import re


def compute_score(data_source, solution_str, ground_truth, extra_info, tolerance=0.01):
    """1 for one marked number within a relative tolerance of the truth."""
    marked = solution_str.rpartition("####")[2] if "####" in solution_str else ""
    number = re.fullmatch(r"\s*\$?(-?\d[\d,]*\.?\d*(?:e-?\d+)?)\s*", marked)
    value = float(number[1].replace(",", "")) if number else math.nan
    right = math.isfinite(value) and math.isclose(value, float(ground_truth), rel_tol=tolerance, abs_tol=1e-9)
    return {"score": float(right), "acc": float(right), "pred": value if number else None}

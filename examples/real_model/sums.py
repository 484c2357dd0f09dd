"""Reward for sums: 1 if the last number of the answer is the right one, else 0."""

from __future__ import annotations

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Compare the last number of an answer with the sum."""
    numbers = re.findall(r"\d+", solution_str.replace(",", ""))
    return float(numbers[-1:] == [ground_truth])

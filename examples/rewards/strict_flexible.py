"""Strict and flexible extraction: full reward for the marked answer, half for a right number at the end without the mark.

Flexible extraction alone is gamed by ending with many numbers until one fits, so a text with several numbers in its last line earns nothing
by it.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info, unmarked=0.5):
    """1 for `#### NUMBER`, ``unmarked`` for a last line with just this number in it."""
    lines = solution_str.strip().splitlines() or [""]
    strict = re.fullmatch(r"####\s*(-?\d+)", lines[-1].strip())
    numbers = re.findall(r"-?\d+", lines[-1])
    marked = strict is not None and strict[1] == str(ground_truth) and solution_str.count("####") == 1
    flexible = "####" not in solution_str and numbers == [str(ground_truth)]
    return {"score": 1.0 if marked else unmarked * flexible, "acc": float(marked or flexible), "format": float(marked)}

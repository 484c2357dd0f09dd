"""Scorer of exact matches after normalisation."""

from __future__ import annotations

import unicodedata
from typing import Any

from hone.rewards.scorers.base import final_answer, register_scorer


@register_scorer("exact", "exact", "exact_match", "multi_hop", "shapes")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 if the response's answer equals the ground truth, or one of them if it is a list.

    The answer is in ``<answer>...</answer>``, after ``####``, or the whole response. Case, Unicode variants, repeated white space
    and punctuation around the answer are ignored.
    """
    answer, marked = final_answer(solution_str)
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    correct = normalise(answer) in {normalise(str(truth)) for truth in truths}
    return {"score": float(correct), "acc": float(correct), "format": float(marked), "pred": answer}


def normalise(text: str) -> str:
    """Return the normalised text for comparison."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(" .,;:!?\"'`*") or folded

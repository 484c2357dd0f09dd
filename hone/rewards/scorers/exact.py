"""Scorer of exact matches after normalisation."""

from __future__ import annotations

import unicodedata
from fractions import Fraction
from typing import Any

from hone.data.answers import final_answer, read_number
from hone.rewards.scorers.base import graded, register_scorer
from hone.rewards.scorers.matching import truths_of


@register_scorer("exact", "exact", "exact_match", "multi_hop", "shapes")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 if the response's answer equals the ground truth, or one of them if it is a list or JSON text of one.

    The answer is in the last ``<answer>...</answer>``, ``\\boxed{}`` or line after ``####``, or is the whole response. Case, Unicode
    variants, repeated white space and punctuation around the answer are ignored. A truth that is a number compares as a number.
    """
    answer, marked = final_answer(solution_str)
    listed = isinstance(ground_truth, list | tuple) or str(ground_truth).lstrip().startswith("[")
    truths = {normalise(truth) for truth in (str(ground_truth), *(truths_of(ground_truth) if listed else ()))}
    if ground_truth is None or not any(truths):
        raise ValueError("the ground truth is empty")
    given = normalise(answer)
    correct = bool(given) and given in truths
    if not correct and type(ground_truth) in (int, float) and (number := read_number(answer)) is not None:
        correct = number.value == Fraction(str(ground_truth))
    return graded(correct, right=correct, marked=marked, pred=answer)


def normalise(text: str) -> str:
    """Return the normalised text for comparison; a stop before a digit and signs stay."""
    folded = " ".join(unicodedata.normalize("NFKC", text).replace("\u2212", "-").casefold().split())
    bare = folded.strip(" .,;:!?\"'`*") or folded
    return f".{bare}" if bare[0:1].isdigit() and folded.partition(bare)[0].endswith(".") else bare

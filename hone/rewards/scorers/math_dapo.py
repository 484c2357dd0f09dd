"""Scorer of mathematics as in DAPO: the text after the last "Answer:", compared as numbers, words or text, 1 or -1."""

from __future__ import annotations

from typing import Any

from hone.data.answers import boxed, plain_text, same_answer, stated_answer
from hone.rewards.scorers.base import graded, register_scorer


@register_scorer("math_dapo", "math_dapo", "math_dapo_*")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    strict_box_verify: bool = False,
    wrong: float = -1.0,
) -> dict[str, Any]:
    r"""Score 1 for the right answer, ``wrong`` for any other or none.

    The answer is after the last "Answer:", else in the last ``\boxed{}``.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the answer.
        extra_info: not used.
        strict_box_verify: True to read only the box.
        wrong: reward of a wrong answer.
    """
    stated = None if strict_box_verify else stated_answer(solution_str, colon=True)
    answer = boxed(solution_str) if stated is None else stated
    correct = same_answer(_result(answer or ""), _result(str(ground_truth))) is True
    return graded(1.0 if correct else wrong, right=correct, marked=answer is not None, pred=answer)


def _result(answer: str) -> str:
    """Return the box in an answer, or what is after its last equals sign."""
    inside = boxed(answer)
    return plain_text(inside if inside is not None else answer).rpartition("=")[2]

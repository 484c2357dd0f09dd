"""Scorer of mathematics as in DAPO: the text after the last "Answer:", normalised as in Minerva, 1 or -1."""

from __future__ import annotations

import re
from typing import Any

from hone.rewards.scorers.base import register_scorer
from hone.rewards.scorers.math_answer import boxed, equal, normalise

TAIL, BOX_TAIL = 300, 100
"""Characters at the end of a response that are searched for "Answer:" and for a box."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WORDS = re.compile(
    r"\b(?:square|units?|integers?|dollars?|mph|inches|ft|hours?|days?|degrees?|cents?|meters?|minutes?|points?|sq)\b"
)


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

    The answer is after the last "Answer:" among the last 300 characters, else in the last ``\boxed{}`` among the last 100.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the answer.
        extra_info: not used.
        strict_box_verify: True to read only the box.
        wrong: reward of a wrong answer.
    """
    answers = [] if strict_box_verify else _ANSWER.findall(solution_str[-TAIL:])
    answer = answers[-1] if answers else boxed(solution_str[-BOX_TAIL:])
    correct = answer is not None and equal(strip_decoration(answer), strip_decoration(str(ground_truth)))
    return {
        "score": 1.0 if correct else wrong,
        "acc": float(correct),
        "format": float(answer is not None),
        "pred": answer,
    }


def strip_decoration(answer: str) -> str:
    """Remove a box, text before "=", words of units, dollar signs and a full stop from an answer."""
    inside = boxed(answer)
    text = (inside if inside is not None else answer).split("=")[-1]
    return normalise(_WORDS.sub("", text.replace("\\$", "").replace("$", "")))

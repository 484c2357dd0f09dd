"""Scorer of digit sequences: graded by correct positions, so that learning can begin from random answers."""

from __future__ import annotations

from typing import Any

from hone.rewards.scorers.base import register_scorer


@register_scorer("digit_sequence", "digit_sequence")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score the digits 0 to 9 of the response, position by position, ignoring other characters.

    ``score = (positions with the right digit) / max(digits expected, digits given)``, in [0, 1]: a response that is too short
    or too long loses in proportion.

    Returns:
        ``score``; ``acc`` (1 if all digits are right); ``pred`` (the digits given).
    """
    expected, given = _digits(str(ground_truth)), _digits(solution_str)
    if not expected:
        raise ValueError(f"ground_truth {ground_truth!r} has no digit")
    right = sum(a == b for a, b in zip(expected, given, strict=False))
    return {"score": right / max(len(expected), len(given)), "acc": float(expected == given), "pred": given}


def _digits(text: str) -> str:
    return "".join(character for character in text if character in "0123456789")

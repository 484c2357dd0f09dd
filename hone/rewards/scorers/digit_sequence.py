"""Digit sequences: graded by how many digits stand in the right place, so that learning can begin from noise."""

from __future__ import annotations

from typing import Any

from hone.rewards.scorers.base import register_scorer


@register_scorer("digit_sequence", "digit_sequence")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score the digits 0 to 9 of the response, everything else left out, position by position.

    ``score = (positions with the right digit) / max(digits wanted, digits given)``, in [0, 1]: a response that is too short
    or too long loses in proportion.

    Returns:
        ``score``; ``acc`` (1 if all is right); ``pred`` (the digits given).
    """
    wanted, given = _digits(str(ground_truth)), _digits(solution_str)
    if not wanted:
        raise ValueError(f"ground_truth {ground_truth!r} holds no digit")
    right = sum(a == b for a, b in zip(wanted, given, strict=False))
    return {"score": right / max(len(wanted), len(given)), "acc": float(wanted == given), "pred": given}


def _digits(text: str) -> str:
    return "".join(character for character in text if character in "0123456789")

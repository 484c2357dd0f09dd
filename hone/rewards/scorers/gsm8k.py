"""Scorer of grade-school word problems, whose answer is a number after ``####``."""

from __future__ import annotations

import re
from typing import Any

from hone.errors import RewardError
from hone.rewards.scorers.base import register_scorer

TAIL = 300
"""Characters at the end of a response that are searched, which keeps searching cheap."""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


@register_scorer("gsm8k", "openai/gsm8k", "gsm8k", "arithmetic", "calculator")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Compare the final number with the ground truth, as text without thousands separators.

    Args:
        data_source: not used.
        solution_str: the response; its last 300 characters are searched.
        ground_truth: the number.
        extra_info: not used.
        method: ``strict`` uses the last number after ``#### ``; ``flexible`` the last number of any form, without a full stop
            after it.
        format_score: reward of a wrong answer in the right format.
        score: reward of the right answer.

    Returns:
        ``score``; ``acc`` (1 if right); ``format`` (1 if an answer was extracted); ``pred`` (the answer, or None).
    """
    answer = extract(solution_str, method)
    correct = answer is not None and answer == _clean(str(ground_truth))
    reward = score if correct else format_score if answer is not None else 0.0
    return {"score": reward, "acc": float(correct), "format": float(answer is not None), "pred": answer}


def extract(text: str, method: str = "strict") -> str | None:
    """Return the number that is a response's answer, or None."""
    text = text[-TAIL:]
    if method == "strict":
        numbers = _STRICT.findall(text)
        return _clean(numbers[-1]) if numbers else None
    if method == "flexible":
        numbers = [number for number in (_clean(match).rstrip(".") for match in _NUMBER.findall(text)) if number]
        return numbers[-1] if numbers else None
    raise RewardError(f"unknown gsm8k method '{method}'", fix="reward.scorer_kwargs.method=strict or flexible")


def _clean(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "")

"""Grade-school word problems: the answer is a number after ``####``."""

from __future__ import annotations

import re
from typing import Any

from hone.errors import RewardError
from hone.rewards.scorers.base import register_scorer

TAIL = 300
"""Characters at the end of a response that are read; an answer belongs there, and searching stays cheap."""

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
        solution_str: the response; its last 300 characters are read.
        ground_truth: the number.
        extra_info: not used.
        method: ``strict`` takes the last number after ``#### ``; ``flexible`` the last number of any kind, and forgives a
            full stop behind it.
        format_score: reward of a wrong answer in the right place.
        score: reward of the right answer.

    Returns:
        ``score``; ``acc`` (1 if right); ``format`` (1 if there is an answer to read); ``pred`` (the answer, or None).
    """
    answer = extract(solution_str, method)
    correct = answer is not None and answer == _clean(str(ground_truth))
    reward = score if correct else format_score if answer is not None else 0.0
    return {"score": reward, "acc": float(correct), "format": float(answer is not None), "pred": answer}


def extract(text: str, method: str = "strict") -> str | None:
    """The number that a response gives as its answer, or None."""
    text = text[-TAIL:]
    if method == "strict":
        found = _STRICT.findall(text)
        return _clean(found[-1]) if found else None
    if method == "flexible":
        numbers = [number for number in (_clean(found).rstrip(".") for found in _NUMBER.findall(text)) if number]
        return numbers[-1] if numbers else None
    raise RewardError(f"unknown gsm8k method '{method}'", fix="reward.scorer_kwargs.method=strict or flexible")


def _clean(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "")

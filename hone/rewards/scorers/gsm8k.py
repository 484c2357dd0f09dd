"""Scorer of grade-school word problems, whose answer is a number after ``####``."""

from __future__ import annotations

from typing import Any

from hone.data.answers import TAIL, Number, after_hashes, find_numbers, leading_number, read_number, stated_answer
from hone.errors import RewardError
from hone.rewards.scorers.base import graded, register_scorer


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
    """Compare the final number with the ground truth, by value.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the number.
        extra_info: not used.
        method: ``strict`` uses the number after the last ``####``; ``flexible`` the last number of any form.
        format_score: reward of a wrong answer in the right format.
        score: reward of the right answer.

    Returns:
        ``score``; ``acc`` (1 if right); ``format`` (1 if an answer was extracted); ``pred`` (the answer, or None).
    """
    truth = read_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    answer = extract(solution_str, method)
    correct = answer is not None and answer.agrees(truth)
    reward = score if correct else format_score if answer is not None else 0.0
    pred = None if answer is None else answer.text
    return graded(reward, right=correct, marked=answer is not None, pred=pred)


def extract(text: str, method: str = "strict") -> Number | None:
    """Return the number that is a response's answer, or None."""
    if method == "flexible":
        return next(reversed(find_numbers(text[-TAIL:])), None)
    if method != "strict":
        raise RewardError(f"unknown gsm8k method '{method}'", fix="reward.scorer_kwargs.method=strict or flexible")
    line = after_hashes(text)
    if line is None:
        return None
    return read_number(stated_answer(line) or line) or leading_number(line.rpartition("=")[2])[0]

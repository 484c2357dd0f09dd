"""The reward of `learning.py`, one for both trainers: 1 for an answer that reasoning-gym's verifier calls right, else 0."""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from reasoning_gym import get_score_answer_fn

verifier = functools.cache(get_score_answer_fn)  # each call of it makes the data set again: 90 ms for spell_backward


def is_right(task: str, answer: str, entry: str) -> float:
    """Judge one answer. ``entry`` is the problem as JSON: question, answer and metadata. Reversed text is compared."""
    problem = json.loads(entry)
    if task == "reversed_text":
        return float(answer.strip() == problem["answer"])
    verify: Any = verifier(task)
    return float(verify(answer.strip(), problem) >= 1.0)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Judge an answer for Hone."""
    return is_right(data_source, solution_str, extra_info["entry"])


def trl_reward(completions: list[Any], task: list[str], entry: list[str], **_: Any) -> list[float]:
    """Judge the answers of a batch for TRL."""
    return [
        is_right(name, completion[0]["content"], problem)
        for name, completion, problem in zip(task, completions, entry, strict=True)
    ]

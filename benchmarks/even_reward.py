"""Reward of `grpo_step.py`, in both trainers' signatures: the share of words that end in an even character."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return the share, with Hone's signature. Words that are numbers count if they are even."""
    words = solution_str.split()
    return sum(ord(word[-1]) % 2 == 0 for word in words) / max(1, len(words))


def even_share(completions: list[str], **columns: Any) -> list[float]:
    """Return the shares, with TRL's signature."""
    return [compute_score("", text, None, None) for text in completions]

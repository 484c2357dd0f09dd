"""Where an answer in tokens ends by a string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARGIN = 4
"""Tokens decoded before a stop string, because some tokenizers treat the first token of a text differently."""


def window(stops: Sequence[str]) -> int:
    """Tokens from the end of an answer in which a stop string may lie: one of b bytes has at most b tokens."""
    return max(len(stop.encode()) for stop in stops) + _MARGIN


def ends_with_stop(tokenizer: Any, tail: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether a stop string lies in the text of an answer's last tokens.

    Args:
        tokenizer: decodes.
        tail: the last :func:`window` tokens of the answer, or all if they are fewer.
        stops: strings that end an answer.
    """
    text = str(tokenizer.decode(tail))
    return any(stop in text for stop in stops)


def first_end(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """How many tokens an answer has up to the first one that completes a stop string; None if none does."""
    if not stops or not ends_with_stop(tokenizer, tokens, stops):
        return None
    size = window(stops)
    ends = (end for end in range(1, len(tokens) + 1))
    return next((end for end in ends if ends_with_stop(tokenizer, tokens[max(0, end - size) : end], stops)), None)

"""Search for stop strings in token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARGIN = 4
"""Tokens decoded before a stop string, because some tokenizers treat the first token of a text differently."""


def window(stops: Sequence[str]) -> int:
    """Return the number of last tokens that can contain a stop string: b bytes have at most b tokens."""
    return max(len(stop.encode()) for stop in stops) + _MARGIN


def ends_with_stop(tokenizer: Any, tail: Sequence[int], stops: Sequence[str]) -> bool:
    """Return whether the text of the last tokens contains a stop string.

    Args:
        tokenizer: for decoding.
        tail: the last :func:`window` tokens of the response, or all if there are fewer.
        stops: strings that end a response.
    """
    text = str(tokenizer.decode(tail))
    return any(stop in text for stop in stops)


def stop_length(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return the number of tokens up to the first one that completes a stop string; None if no token does."""
    if not stops or not ends_with_stop(tokenizer, tokens, stops):
        return None
    size = window(stops)
    ends = (end for end in range(1, len(tokens) + 1))
    return next((end for end in ends if ends_with_stop(tokenizer, tokens[max(0, end - size) : end], stops)), None)

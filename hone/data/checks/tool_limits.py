"""Measure tool results and tool calls in prompts, to compare them with the limits of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import token_counts
from hone.data.files import Row
from hone.data.messages import unwrapped

_MOST_TOKENIZED = 4000


@dataclass
class ToolResultLengths:
    """Lengths of tool results in prompts.

    Attributes:
        results: number of tool results.
        long: token lengths of those over the limit, longest first.
        where: row of the first of them.
    """

    results: int
    long: list[int] = field(default_factory=list)
    where: str = ""


def tool_result_lengths(
    rows: Sequence[Row], key: str, tokenizer: PreTrainedTokenizerBase, limit: int
) -> ToolResultLengths:
    """Measure the tool results in the prompts of column ``key`` against ``limit`` tokens.

    A token has at least one byte, so results with at most ``limit`` bytes are not tokenized; of the others, the longest 4000 are.
    """
    results = [
        (row, message["content"])
        for row in rows
        for message in _messages(row, key)
        if message.get("role") == "tool" and isinstance(message.get("content"), str)
    ]
    candidates = [(row, text) for row, text in results if len(text.encode()) > limit]
    candidates = sorted(candidates, key=lambda pair: -len(pair[1]))[:_MOST_TOKENIZED]
    counts = token_counts(tokenizer, [text for _, text in candidates])
    long = [(count, row) for count, (row, _) in zip(counts, candidates, strict=True) if count > limit]
    return ToolResultLengths(
        len(results), sorted((count for count, _ in long), reverse=True), long[0][1].where if long else ""
    )


def tool_turns(rows: Sequence[Row], key: str) -> list[int]:
    """Return the number of calls of each assistant message with tool calls, in the prompts of column ``key``."""
    called = [m.get("tool_calls") for row in rows for m in _messages(row, key) if m.get("role") == "assistant"]
    return [len(calls) for calls in called if isinstance(calls, list) and calls]


def _messages(row: Row, key: str) -> list[dict[str, Any]]:
    value = unwrapped(row.values.get(key))
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []

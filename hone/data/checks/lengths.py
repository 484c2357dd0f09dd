"""Measure prompts in tokens, without tokenizing those that cannot be too long.

A token covers at least one byte of text (byte-level and byte-fallback tokenizers alike). A prompt whose rendered bytes
do not exceed the limit is therefore not too long. Only the others are rendered and tokenized, the longest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import render_texts, token_counts
from hone.data.files import Row
from hone.data.messages import unwrapped
from hone.errors import DataError, Finding

MOST_TOKENIZED = 4000  # largest number of rows that are tokenized
_MESSAGE_BYTES = 64  # bytes that a chat template may add per message, in addition to those of an empty conversation


@dataclass
class PromptLengths:
    """Measured lengths of prompts."""

    rows: int
    limit: int
    overlong: list[int] = field(default_factory=list)  # token lengths of rows over the limit, longest first
    exact: bool = True  # whether all rows that could exceed it were tokenized
    longest: str = ""  # place of the longest row
    with_system: int = 0  # number of overlong rows that begin with a system message
    refused: list[tuple[str, str]] = field(default_factory=list)  # errors of the chat template, with the row

    @property
    def p99(self) -> int | None:
        rank = max(0, self.rows // 100 - 1)
        return self.overlong[rank] if rank < len(self.overlong) else None

    def describe(self) -> str:
        """Return, for example, ``412 of 7473 prompts are longer than 512 tokens (longest 701, 99th percentile 640)``."""
        at_least = "" if self.exact else "at least "
        p99 = f", 99th percentile {self.p99}" if self.p99 else ""
        return (
            f"{at_least}{len(self.overlong)} of {self.rows} prompts are longer than {self.limit} tokens "
            f"(longest {self.overlong[0]}{p99})"
        )


def prompt_lengths(
    rows: Sequence[Row],
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    extra: Sequence[int] | None = None,
) -> PromptLengths:
    """Measure the prompts in column ``key`` against ``limit`` tokens, with their chat template.

    ``extra`` are the tokens that each row's images take besides their placeholders.
    """
    extra = extra or [0] * len(rows)
    lengths = PromptLengths(len(rows), limit)
    frame = _frame(tokenizer, chat_template_kwargs)
    bounds = [(_bytes(row.values.get(key), frame) + extra[number], number) for number, row in enumerate(rows)]
    candidates = sorted((bound, number) for bound, number in bounds if bound > limit)[::-1]
    lengths.exact = len(candidates) <= MOST_TOKENIZED
    numbers = [number for _, number in candidates[:MOST_TOKENIZED]]
    chosen = [rows[number] for number in numbers]
    texts = _lengths(chosen, key, tokenizer, chat_template_kwargs, lengths)
    measured = []
    for number, row, length in zip(numbers, chosen, texts, strict=True):
        if length is not None and length + extra[number] > limit:
            measured.append((length + extra[number], row))
    measured.sort(key=lambda pair: -pair[0])
    lengths.overlong = [length for length, _ in measured]
    lengths.longest = measured[0][1].where if measured else ""
    lengths.with_system = sum(_has_system(row.values.get(key)) for _, row in measured)
    return lengths


def overlong_prompts(lengths: PromptLengths, policy: str) -> Iterator[Finding]:
    """Report the effect of ``data.truncation`` on prompts over the limit (R45), and lost system messages (R36)."""
    if not lengths.overlong:
        return
    share = len(lengths.overlong) / lengths.rows
    fix = f"data.max_prompt_length={lengths.overlong[0]}"
    if policy == "error":
        yield _finding("R45", lengths, "the run stops when it reads them", f"{fix}, or data.truncation=drop", True)
    elif policy in ("truncate", "left") and lengths.with_system:
        why = f"{lengths.with_system} of them begin with a system message, and truncation removes the beginning"
        yield _finding("R36", lengths, why, f"{fix}, or data.truncation=drop", True)
    elif share > 0.05:
        effect = "dropped" if policy == "drop" else f"truncated ({policy})"
        yield _finding("R45", lengths, f"{share:.0%} of the data are {effect}", fix, False)


def _finding(code: str, lengths: PromptLengths, why: str, fix: str, stops: bool) -> Finding:
    return Finding(DataError(lengths.describe(), why=why, fix=fix, where=lengths.longest, code=code), stops)


def _frame(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None) -> int:
    """Return the bytes that the template adds to a short conversation, including generation prompt and system message."""
    try:
        (text,) = render_texts(tokenizer, [[{"role": "user", "content": "x"}]], True, kwargs)
    except DataError:
        return 0
    return len(text.encode())


def _bytes(value: Any, frame: int) -> int:
    """Return an upper bound on the tokens of a prompt."""
    if isinstance(value, str):
        return _size(value) + 2
    if not isinstance(value, list):
        return 0
    if value and isinstance(value[0], int):
        return len(value)
    return frame + sum(_message_bytes(message) + _MESSAGE_BYTES for message in value)


def _message_bytes(message: Any) -> int:
    if isinstance(message, dict) and all(type(part) is str for part in message.values()):
        return sum(map(_size, message.values()))
    return _size(str(message))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _lengths(
    rows: Sequence[Row],
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: dict[str, Any] | None,
    lengths: PromptLengths,
) -> list[int | None]:
    """Return the tokens of each prompt, None where the template refuses it."""
    values = [unwrapped(row.values[key]) for row in rows]
    texts: list[str | None] = [value if isinstance(value, str) else None for value in values]
    for number, (row, value) in enumerate(zip(rows, values, strict=True)):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            try:
                texts[number] = render_texts(tokenizer, [value], True, kwargs)[0]
            except DataError as error:
                lengths.refused.append((row.where, error.what))
    rendered = [text for text in texts if text is not None]
    counts = iter(token_counts(tokenizer, rendered))
    return [
        next(counts) if text is not None else len(value) if value and isinstance(value[0], int) else None
        for text, value in zip(texts, values, strict=True)
    ]


def _has_system(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and value[0].get("role") == "system"

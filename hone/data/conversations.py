"""The conversations of SFT: rows of messages with the exact mask of what the assistant said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import Conversation, render_conversations
from hone.data.files import read_rows
from hone.data.overlong import check_lengths
from hone.errors import DataError

log = logging.getLogger("hone")

__all__ = ["Conversation", "ConversationDataset"]


class ConversationDataset:
    """Rows of chat messages as :class:`~hone.data.chat.Conversation`.

    Args:
        files: parquet, json or jsonl files.
        tokenizer: renders and encodes.
        messages_key: column of the messages.
        max_length: in tokens.
        truncation: policy for longer ones: ``error``, ``drop``, ``truncate`` (cut the end).
        max_samples: read at most this many rows; -1 means all.
        chat_template_kwargs: extra arguments of the chat template.

    Attributes:
        dropped: rows left out: too long, or nothing of the assistant left after cutting.
        truncated: rows cut.

    Raises:
        DataError: files, columns, types, lengths or templates are wrong.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages_key: str,
        max_length: int,
        truncation: str,
        max_samples: int = -1,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        where = ", ".join(files)
        rows = read_rows(files, needs=[messages_key], max_samples=max_samples)
        for uid, row in rows:
            _check_messages(row[messages_key], uid, messages_key)
        chats = [row[messages_key] for _, row in rows]
        rendered = render_conversations(tokenizer, chats, **(chat_template_kwargs or {}))
        lengths = [len(conversation.input_ids) for conversation in rendered]
        over = check_lengths(lengths, max_length, truncation, key="data.max_length", where=where)
        cut = [Conversation(c.input_ids[:max_length], c.loss_mask[:max_length]) for c in rendered]
        keep = [any(c.loss_mask) and not (long and truncation == "drop") for c, long in zip(cut, over, strict=True)]
        self._conversations = [conversation for conversation, kept in zip(cut, keep, strict=True) if kept]
        self.dropped = keep.count(False)
        self.truncated = sum(long and kept for long, kept in zip(over, keep, strict=True))
        if self.dropped or self.truncated:
            log.warning(
                "%s: %d conversations dropped, %d cut at %d tokens", where, self.dropped, self.truncated, max_length
            )

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


def _check_messages(messages: Any, uid: str, key: str) -> None:
    good = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not good:
        raise DataError(
            f"column '{key}' does not hold messages: {str(messages)[:80]!r}",
            where=uid,
            fix='give [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
            code="R42",
        )

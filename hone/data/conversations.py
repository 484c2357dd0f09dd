"""Datasets of conversations for supervised fine-tuning: token ids and a mask of the assistant's tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.checks.tools import NO_LIMIT, check_calls, is_unsound
from hone.data.files import Row, RowReader, read_rows
from hone.data.image_processor import ImageProcessor
from hone.data.images import ImageData
from hone.data.messages import check_messages, plain, schemas_of
from hone.data.row_images import RowImages, loses_image
from hone.data.tokenizing import Chats, check_policy, overlong_rows, shortened, tokenize
from hone.errors import DataError

log = logging.getLogger(__name__)


@dataclass
class Conversation:
    """One conversation, ready for training."""

    input_ids: list[int]
    # 1 on assistant turns and the end-of-turn token that follows each, 0 on tokens of images; same length as
    # ``input_ids``
    loss_mask: list[int]
    images: tuple[ImageData, ...] = ()  # images of the conversation, in order


class ConversationDataset:
    """Conversations of parquet or JSON files, rendered with the tokenizer's chat template.

    Args:
        messages_key: column of chat messages; every row needs at least one assistant message.
        truncation: treatment of a longer one: ``error``, ``drop``, or the side whose tokens are removed, ``left``, ``right`` (or
            ``truncate``) or ``middle``; a row without any remaining assistant token counts as dropped.
        max_samples: use the first rows only; -1 uses all.
        read: reader of the rows, called as :func:`~hone.data.files.read_rows`; None reads files.
        tools_key: column of the conversation's function schemas, a list or its JSON text; it may be missing.
        image_key: column of the images, see :mod:`hone.data.row_images`.
        image_processor: of the model; None for a model of text, whose rows have no images.

    Attributes:
        dropped: rows left out, those included that a truncation would deprive of tokens of an image.
        truncated: rows cut and kept.

    Raises:
        DataError: a file, column or row is wrong, the chat template rewrites earlier turns, or a conversation is too
            long under the policy ``error``.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages_key: str,
        max_length: int,
        truncation: str,
        max_samples: int = -1,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools_key: str = "tools",
        drop_bad_calls: bool = False,
        read: RowReader | None = None,
        image_key: str = "images",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        check_policy(truncation)
        images = RowImages(image_key, image_processor)
        rows = (read or read_rows)(
            files,
            required=(messages_key,),
            optional=(tools_key, *images.columns),
            max_rows=max_samples,
            refused=images.refused,
        )
        if drop_bad_calls:
            rows = _with_sound_calls(rows, messages_key, tools_key)
        if not rows:
            raise DataError(f"max_samples={max_samples} leaves no row", fix="data.max_samples=-1 uses all rows")
        placed = [
            images.place(check_messages(plain(row.values[messages_key]), where=row.where, column=messages_key), row)
            for row in rows
        ]
        chats, contents = [messages for messages, _ in placed], [shown for _, shown in placed]
        tools = [schemas_of(row.values.get(tools_key), row.where) for row in rows]
        names = [row.where for row in rows]
        tokens = tokenize(tokenizer, Chats("conversation", chats, tools, names, chat_template_kwargs or {}))
        rendered = [
            images.expand_masked(ids, mask, shown, name)
            for (ids, mask), shown, name in zip(tokens, contents, names, strict=True)
        ]
        long = overlong_rows(
            [len(ids) for ids, _ in rendered], max_length, truncation, what="conversations", key="data.max_length"
        )
        side = "right" if truncation in ("truncate", "drop") else truncation
        self._conversations: list[Conversation] = []
        for row, (ids, mask) in enumerate(rendered):
            if row in long:
                kept = shortened(mask, max_length, side)
                shorter = shortened(ids, max_length, side)
                if truncation == "drop" or 1 not in kept or loses_image(ids, shorter):
                    continue
                ids, mask = shorter, kept
            self._conversations.append(Conversation(ids, mask, contents[row]))
        self.dropped = len(rendered) - len(self._conversations)
        self.truncated = len(long) - self.dropped
        if long:
            log.warning(
                "%d of %d conversations are longer than %d tokens: %d dropped, %d truncated",
                len(long),
                len(rendered),
                max_length,
                self.dropped,
                self.truncated,
            )
        if not self._conversations:
            raise DataError(
                f"none of {len(rendered)} conversations keeps its images and an assistant token within data.max_length={max_length}",
                fix=f"data.max_length={max(len(ids) for ids, _ in rendered)}",
            )

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


def _with_sound_calls(rows: list[Row], messages_key: str, tools_key: str) -> list[Row]:
    named = [dataclasses.replace(row, values={**row.values, "tools": row.values.get(tools_key)}) for row in rows]
    check = check_calls(named, messages_key=messages_key, limit=NO_LIMIT)
    kept = [row for number, row in enumerate(rows) if not is_unsound(check.defects.get(number, ()))]
    if len(kept) < len(rows):
        log.warning("%d of %d conversations with unsound tool calls are left out", len(rows) - len(kept), len(rows))
    if not kept:
        raise DataError(
            f"all {len(rows)} conversations have unsound tool calls",
            why="nothing is left to train on",
            fix="data.tool_call_errors=count, or repair the rows that `hone data check` names",
            where="data.tool_call_errors",
            code="R81",
        )
    return kept

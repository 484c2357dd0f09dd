"""Chat messages to token ids: prompts for generation, and conversations with the mask of what the assistant said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hone.errors import DataError, ModelError

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation.

    Attributes:
        input_ids: all its tokens.
        loss_mask: 1 exactly on what the assistant has to produce: its text and the token that ends its turn.
    """

    input_ids: list[int]
    loss_mask: list[int]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, **template: Any) -> list[int]:
    """Token ids of one prompt, generation prompt included."""
    return render_prompts(tokenizer, [messages], **template)[0]


def render_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], **template: Any) -> list[list[int]]:
    """Token ids of many prompts, generation prompt included.

    Raises:
        ModelError: the tokenizer has no chat template.
        DataError: the template rejects a prompt.
    """
    texts = _render(tokenizer, prompts, add_generation_prompt=True, **template)
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[return-value]


def render_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Messages], **template: Any
) -> list[Conversation]:
    """Render conversations and mark what the assistant has to produce, in every assistant turn.

    The text of turn i is what rendering messages 0..i adds to rendering messages 0..i-1 with the generation prompt; of it,
    everything up to the turn's last special token counts (the end-of-turn token), and what the template puts after it
    (a line break, say) does not. So the template alone decides, whatever its family.

    Raises:
        DataError: the template rewrites earlier turns (its output for a conversation does not begin with its output for
            the conversation's beginning), so no mask would be exact; or a conversation has no assistant turn.
    """
    whole = _render(tokenizer, conversations, add_generation_prompt=False, **template)
    turns = [
        (row, i)
        for row, messages in enumerate(conversations)
        for i, m in enumerate(messages)
        if m["role"] == "assistant"
    ]
    openings = _render(tokenizer, [conversations[row][:i] for row, i in turns], add_generation_prompt=True, **template)
    endings = _render(
        tokenizer, [conversations[row][: i + 1] for row, i in turns], add_generation_prompt=False, **template
    )
    spans: list[list[tuple[int, int]]] = [[] for _ in conversations]
    for (row, turn), opening, ending in zip(turns, openings, endings, strict=True):
        if not (ending.startswith(opening) and whole[row].startswith(ending)):
            raise DataError(
                f"the chat template rewrites earlier turns: conversation {row} does not begin with the rendering of its "
                f"first {turn + 1} messages",
                why="which tokens the assistant produced cannot be told exactly",
                fix="split the conversation so that each row ends with one assistant turn, or set model.custom_chat_template",
            )
        spans[row].append((len(opening), len(ending)))
    for row, found in enumerate(spans):
        if not found:
            raise DataError(
                f"conversation {row} has no assistant turn",
                why="there is nothing to learn from it",
                fix="remove the row",
            )
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids)
    rows = zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)  # type: ignore[arg-type]
    return [Conversation(list(ids), _mask(ids, offsets, found, special)) for ids, offsets, found in rows]


def _mask(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], special: set[int]
) -> list[int]:
    mask = [0] * len(ids)
    for begin, end in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a and b <= end and b > a]
        last = max((i for i in inside if ids[i] in special), default=inside[-1] if inside else -1)
        for i in inside:
            mask[i] = int(i <= last)
    return mask


def _render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    *,
    add_generation_prompt: bool,
    **template: Any,
) -> list[str]:
    if not conversations:
        return []
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, and the data holds chat messages",
            where="model.custom_chat_template",
            fix="model.custom_chat_template=<file.jinja>, or give prompts as strings or token ids",
        )
    try:
        return tokenizer.apply_chat_template(
            [list(messages) for messages in conversations],  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template,
        )  # type: ignore[return-value]
    except (TemplateError, TypeError, KeyError) as error:
        raise DataError(
            f"the chat template rejects the messages: {error}", fix="check roles and contents of the data"
        ) from error

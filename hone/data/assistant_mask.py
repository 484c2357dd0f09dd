"""Render conversations to token ids and mark the tokens that an assistant wrote.

The mask of a conversation is derived from the template itself:

1. If the template marks assistant text with ``{% generation %}``, those marks are used. An end-of-sequence token that
   directly follows a marked span is added.
2. Otherwise prefixes are rendered. For the assistant turn i of messages m, with ``full = render(m)``::

       before = render(m[:i], generation prompt)      context from which the model generates turn i
       after  = render(m[:i + 1])                     the conversation up to the end of turn i

   ``before`` must be a prefix of ``full``; the turn begins where it ends. If ``after`` is a prefix too, the turn ends with
   it, without the white space that follows its last special token (the end-of-turn token). If it is not, the template
   renders the turn differently once more messages follow (Qwen3 drops an empty ``<think>`` block). Then **the rendering in
   the full conversation counts**, up to and including its end-of-turn token.

   In both cases the turn must contain the message's content, white space ignored. A template that drops part of it, or
   changes anything before the turn, is refused: the run would train on text that is not in the dataset or its context.

3. The tokens before a turn are exactly those of ``before`` alone, as in generation. Where a token would cross the boundary
   (a line break that ends the prompt and one that begins the answer), the two sides are tokenized separately.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hone.data.chat import (
    REFUSALS,
    Messages,
    encode_texts,
    in_parts,
    refused,
    render_texts,
    special_tokens,
    template_of,
    text_of,
)
from hone.errors import DataError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of conversations, and 1 for each token of an assistant turn (end-of-turn token included).

    Args:
        tokenizer: with a chat template.
        conversations: each a list of messages.
        chat_template_kwargs: additional arguments of the template.
        names: source of each conversation, for error messages.

    Returns:
        One ``(input_ids, mask)`` for each conversation, two lists of equal length.

    Raises:
        DataError: no chat template; a conversation without an assistant turn; a template that rewrites earlier turns
            (see the rule in the module's docstring).
    """
    names = names or [f"conversation {index}" for index in range(len(conversations))]
    for messages, name in zip(conversations, names, strict=True):
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"no message with role 'assistant' among {len(messages)}",
                where=name,
                why="there is no answer to train on",
                fix="add the answer as an assistant message, or remove the row",
            )
    if _MARKS.search(template_of(tokenizer)):
        return [
            _marked(tokenizer, messages, chat_template_kwargs, name)
            for messages, name in zip(conversations, names, strict=True)
        ]
    return _by_prefixes(tokenizer, conversations, chat_template_kwargs, names)


# ------------------------------------------------------------------------------------------------- marks of the template


def _marked(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, kwargs: dict[str, Any] | None, name: str
) -> tuple[list[int], list[int]]:
    try:
        texts, spans = render_jinja_template(
            conversations=list(in_parts(tokenizer, template_of(tokenizer), [messages])),  # type: ignore[arg-type]
            chat_template=template_of(tokenizer),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **(kwargs or {})},
        )
    except REFUSALS as error:
        raise refused(error, name) from error
    text, marks = texts[0], [(int(start), int(end)) for start, end in spans[0] if end > start]
    if not marks:
        raise DataError(
            "the chat template's {% generation %} block marks nothing",
            where=name,
            fix="put the assistant's content inside {% generation %} and {% endgeneration %}, or remove the marks",
        )
    ids, mask = _masked_by_offsets(tokenizer, text, marks)
    for i in range(1, len(ids)):
        if mask[i - 1] == 1 and mask[i] == 0 and ids[i] == tokenizer.eos_token_id != ids[i - 1]:
            mask[i] = 1
    return ids, mask


def _masked_by_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str, marks: list[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Return the tokens of ``text``, and 1 for those within marked characters; no token crosses the end of a mark (rule 3)."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    edges = {edge for mark in marks for edge in mark}
    if not any(a < edge < b for a, b in encoded["offset_mapping"] for edge in edges):
        within = [int(any(start <= a and b <= end for start, end in marks)) for a, b in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), within
    cuts = sorted({0, len(text), *edges})
    chunks = encode_texts(tokenizer, [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
    starts = {start for start, _ in marks}
    mask = [int(cut in starts) for cut, chunk in zip(cuts, chunks, strict=False) for _ in chunk]
    return [token for chunk in chunks for token in chunk], mask


# --------------------------------------------------------------------------------------------------- rendered prefixes


@dataclass
class _Turn:
    """One assistant turn: the text before it, the text up to its end, and their tokens."""

    index: int
    content: Any
    before: str
    after: str
    before_ids: list[int] = field(default_factory=list)
    after_ids: list[int] = field(default_factory=list)


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    kwargs: dict[str, Any] | None,
    names: Sequence[str],
) -> list[tuple[list[int], list[int]]]:
    fulls = render_texts(tokenizer, conversations, False, kwargs)
    full_ids = encode_texts(tokenizer, fulls)
    turns = _assistant_turns(tokenizer, conversations, fulls, full_ids, kwargs)
    special = special_tokens(tokenizer)
    rendered = []
    for full, ids, its_turns, name in zip(fulls, full_ids, turns, names, strict=True):
        prefixes = [(t.before, t.before_ids) for t in its_turns] + [(t.after, t.after_ids) for t in its_turns]
        if any(full.startswith(text) and ids[: len(prefix_ids)] != prefix_ids for text, prefix_ids in prefixes):
            ids = _tokenize_separately(tokenizer, full, its_turns)
        mask = [0] * len(ids)
        for turn in its_turns:
            start, end = _span(tokenizer, full, ids, turn, special, name)
            mask[start:end] = [1] * (end - start)
        rendered.append((ids, mask))
    return rendered


def _assistant_turns(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    fulls: list[str],
    full_ids: list[list[int]],
    kwargs: dict[str, Any] | None,
) -> list[list[_Turn]]:
    """Return the turns of each conversation; one call renders and one call tokenizes all prefixes."""
    where = [(n, i) for n, chat in enumerate(conversations) for i, m in enumerate(chat) if m["role"] == "assistant"]
    befores = render_texts(tokenizer, [conversations[n][:i] for n, i in where], True, kwargs)
    inner = [(n, i) for n, i in where if i + 1 < len(conversations[n])]  # a last turn ends with the conversation
    endings = render_texts(tokenizer, [conversations[n][: i + 1] for n, i in inner], False, kwargs)
    ends = dict(zip(inner, zip(endings, encode_texts(tokenizer, endings), strict=True), strict=True))
    turns: list[list[_Turn]] = [[] for _ in conversations]
    for (n, i), before, before_ids in zip(where, befores, encode_texts(tokenizer, befores), strict=True):
        after, after_ids = ends.get((n, i), (fulls[n], full_ids[n]))
        turns[n].append(_Turn(i, conversations[n][i].get("content"), before, after, before_ids, after_ids))
    return turns


def _span(
    tokenizer: PreTrainedTokenizerBase, full: str, ids: list[int], turn: _Turn, special: set[int], name: str
) -> tuple[int, int]:
    """Return the index of the turn's first token and the index after its last."""
    start = len(turn.before_ids)
    if not full.startswith(turn.before) or ids[:start] != turn.before_ids:
        raise _rewritten(tokenizer, name, turn.index, turn.before_ids, ids)
    if full.startswith(turn.after) and ids[: len(turn.after_ids)] == turn.after_ids:
        end = _trimmed(tokenizer, ids, start, len(turn.after_ids), special)
        text = turn.after[len(turn.before) :]
    else:
        end_in_full = _end_in_full(tokenizer, ids, turn, special)
        if end_in_full is None:
            raise _rewritten(tokenizer, name, turn.index, turn.after_ids, ids)
        end, text = end_in_full, text_of(tokenizer, ids[start:end_in_full])
    if isinstance(turn.content, str) and _without_white_space(turn.content) not in _without_white_space(text):
        raise DataError(
            f"the chat template changes the content of message {turn.index}: {turn.content[:80]!r} becomes {text[:80]!r}",
            where=name,
            why="the model would be trained on text that differs from the dataset",
            fix="split the conversation so that each row ends with one assistant turn, "
            "or set model.custom_chat_template to a template that keeps the content",
        )
    return start, end


def _tokenize_separately(tokenizer: PreTrainedTokenizerBase, full: str, turns: list[_Turn]) -> list[int]:
    """Tokenize a conversation in chunks that end at the borders of its turns.

    No token then spans a border, and the tokens before every turn are those of generation (rule 3). The turns' prefixes get
    their tokens from the same chunks.
    """
    prefixes = [text for turn in turns for text in (turn.before, turn.after) if full.startswith(text)]
    cuts = sorted({0, len(full), *map(len, prefixes)})
    chunks = encode_texts(tokenizer, [full[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
    ids_up_to = {cut: [token for chunk in chunks[:count] for token in chunk] for count, cut in enumerate(cuts)}
    for turn in turns:
        if full.startswith(turn.before):
            turn.before_ids = ids_up_to[len(turn.before)]
        if full.startswith(turn.after):
            turn.after_ids = ids_up_to[len(turn.after)]
    return ids_up_to[len(full)]


def _without_white_space(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _trimmed(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int, special: set[int]) -> int:
    """Return the end of the turn ``ids[start:end]``, without the white space that follows its last special token."""
    for last in range(end - 1, start - 1, -1):
        if ids[last] in special:
            return last + 1 if not text_of(tokenizer, ids[last + 1 : end]).strip() else end
    return end


def _end_in_full(tokenizer: PreTrainedTokenizerBase, ids: list[int], turn: _Turn, special: set[int]) -> int | None:
    """Return the end of a turn that the full conversation renders differently: its end-of-turn token, counted from its start."""
    start = len(turn.before_ids)
    if turn.after_ids[:start] != turn.before_ids:
        return None
    turn_ids = turn.after_ids[start : _trimmed(tokenizer, turn.after_ids, start, len(turn.after_ids), special)]
    if not turn_ids or turn_ids[-1] not in special:
        return None
    remaining = turn_ids.count(turn_ids[-1])
    for position in range(start, len(ids)):
        remaining -= ids[position] == turn_ids[-1]
        if remaining == 0:
            return position + 1
    return None


def _rewritten(
    tokenizer: PreTrainedTokenizerBase, name: str, index: int, prefix: list[int], full: list[int]
) -> DataError:
    position = next(
        (i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), min(len(prefix), len(full))
    )
    prefix_text, full_text = (
        text_of(tokenizer, prefix[position : position + 8]),
        text_of(tokenizer, full[position : position + 8]),
    )
    return DataError(
        f"the chat template renders the text up to message {index} differently once more messages follow: "
        f"from token {position} it is {prefix_text!r} without them and {full_text!r} with them",
        where=name,
        why="the model would be trained on text that it does not read or write during generation",
        fix="split the conversation so that each row ends with one assistant turn, "
        "or set model.custom_chat_template to a template that only appends",
    )

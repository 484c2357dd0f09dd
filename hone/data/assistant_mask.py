"""Rendering conversations to token ids, and which of those tokens an assistant wrote.

The mask of a conversation is found from the template itself:

1. The template marks assistant text with ``{% generation %}``: its marks are taken, and the end-of-sequence token that
   follows a marked span is added when the template left it outside.
2. Otherwise by rendering prefixes. For the assistant turn i of messages m, with ``full = render(m)``::

       before = render(m[:i], generation prompt)      what the model is given when it writes turn i
       after  = render(m[:i + 1])                     the conversation up to the end of turn i

   ``before`` must be a prefix of ``full``; the turn begins where it ends. Where ``after`` is a prefix too, the turn ends
   with it, less the white space behind its last special token (the end-of-turn token). Where it is not, the template renders
   the turn differently once more messages follow (Qwen3 drops an empty ``<think>`` block): then **the turn counts as it
   stands in the full conversation**, up to and with its end-of-turn token.

   Either way the message's content must stand in the turn, white space aside. A template that drops part of it, or alters
   anything before the turn, is refused: training would be on text that is not in the dataset or not in the model's context.

3. The tokens before a turn are exactly those of ``before`` alone, as in generation. Where a token would reach across the
   boundary (a line break that ends the prompt and one that begins the answer), the pieces are tokenized separately.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hone.data.chat import REFUSALS, Messages, encode_texts, refused, render_texts, special_tokens, template_of, text_of
from hone.errors import DataError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Token ids of whole conversations and, for each token, 1 where an assistant turn is (end-of-turn token included).

    Args:
        tokenizer: with a chat template.
        conversations: each a list of messages.
        chat_template_kwargs: extra arguments of the template.
        names: where each conversation comes from, for error messages.

    Returns:
        Of each conversation ``(input_ids, mask)``, two lists of equal length.

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
                why="there is nothing to imitate",
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
            conversations=[messages],  # type: ignore[arg-type]
            chat_template=template_of(tokenizer),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **(kwargs or {})},
        )
    except REFUSALS as error:
        raise refused(error, name) from error
    text, marks = texts[0], [(int(start), int(end)) for start, end in spans[0] if end > start]
    if not marks:
        raise DataError("the chat template's {% generation %} block marks nothing", where=name, fix="mend the template")
    ids, mask = _masked_by_offsets(tokenizer, text, marks)
    for i in range(1, len(ids)):
        if mask[i - 1] == 1 and mask[i] == 0 and ids[i] == tokenizer.eos_token_id != ids[i - 1]:
            mask[i] = 1
    return ids, mask


def _masked_by_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str, marks: list[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Tokens of ``text``, and 1 for those within marked characters; no token reaches across a mark's ends (rule 3)."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    edges = {edge for mark in marks for edge in mark}
    if not any(a < edge < b for a, b in encoded["offset_mapping"] for edge in edges):
        within = [int(any(start <= a and b <= end for start, end in marks)) for a, b in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), within
    cuts = sorted({0, len(text), *edges})
    pieces = encode_texts(tokenizer, [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
    starts = {start for start, _ in marks}
    mask = [int(cut in starts) for cut, piece in zip(cuts, pieces, strict=False) for _ in piece]
    return [token for piece in pieces for token in piece], mask


# --------------------------------------------------------------------------------------------------- rendered prefixes


@dataclass
class _Turn:
    """One assistant turn: the texts before it and up to its end, and their tokens."""

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
        if any(full.startswith(text) and ids[: len(own)] != own for text, own in prefixes):
            ids = _cut_apart(tokenizer, full, its_turns)
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
    """The turns of each conversation; all prefixes are rendered and tokenized in one call each."""
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
    """First token of the turn, and the one behind its last."""
    start = len(turn.before_ids)
    if not full.startswith(turn.before) or ids[:start] != turn.before_ids:
        raise _rewritten(tokenizer, name, turn.index, turn.before_ids, ids)
    if full.startswith(turn.after) and ids[: len(turn.after_ids)] == turn.after_ids:
        end = _trimmed(tokenizer, ids, start, len(turn.after_ids), special)
        text = turn.after[len(turn.before) :]
    else:
        found = _end_in_full(tokenizer, ids, turn, special)
        if found is None:
            raise _rewritten(tokenizer, name, turn.index, turn.after_ids, ids)
        end, text = found, text_of(tokenizer, ids[start:found])
    if isinstance(turn.content, str) and _squeezed(turn.content) not in _squeezed(text):
        raise DataError(
            f"the chat template changes the content of message {turn.index}: {turn.content[:80]!r} becomes {text[:80]!r}",
            where=name,
            why="the model would be trained on something other than the dataset holds",
            fix="split the conversation so that each row ends with one assistant turn, "
            "or set model.custom_chat_template to a template that keeps the content",
        )
    return start, end


def _cut_apart(tokenizer: PreTrainedTokenizerBase, full: str, turns: list[_Turn]) -> list[int]:
    """Tokens of a conversation in which text before and within a turn would share a token: each piece on its own.

    The tokens before every turn are then those that the model is given when it writes the turn (rule 3). The prefixes of the
    turns get their tokens in the same way.
    """
    prefixes = [text for turn in turns for text in (turn.before, turn.after) if full.startswith(text)]
    cuts = sorted({0, len(full), *map(len, prefixes)})
    pieces = encode_texts(tokenizer, [full[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
    upto = {cut: [token for piece in pieces[:count] for token in piece] for count, cut in enumerate(cuts)}
    for turn in turns:
        if full.startswith(turn.before):
            turn.before_ids = upto[len(turn.before)]
        if full.startswith(turn.after):
            turn.after_ids = upto[len(turn.after)]
    return upto[len(full)]


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def _trimmed(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int, special: set[int]) -> int:
    """End of the turn ``ids[start:end]`` without the white space behind its last special token."""
    for last in range(end - 1, start - 1, -1):
        if ids[last] in special:
            return last + 1 if not text_of(tokenizer, ids[last + 1 : end]).strip() else end
    return end


def _end_in_full(tokenizer: PreTrainedTokenizerBase, ids: list[int], turn: _Turn, special: set[int]) -> int | None:
    """End of a turn that reads differently in the full conversation: its end-of-turn token, counted from its start."""
    start = len(turn.before_ids)
    if turn.after_ids[:start] != turn.before_ids:
        return None
    alone = turn.after_ids[start : _trimmed(tokenizer, turn.after_ids, start, len(turn.after_ids), special)]
    if not alone or alone[-1] not in special:
        return None
    remaining = alone.count(alone[-1])
    for position in range(start, len(ids)):
        remaining -= ids[position] == alone[-1]
        if remaining == 0:
            return position + 1
    return None


def _rewritten(
    tokenizer: PreTrainedTokenizerBase, name: str, index: int, prefix: list[int], full: list[int]
) -> DataError:
    at = next((i for i, (a, b) in enumerate(zip(prefix, full, strict=False)) if a != b), min(len(prefix), len(full)))
    alone, together = text_of(tokenizer, prefix[at : at + 8]), text_of(tokenizer, full[at : at + 8])
    return DataError(
        f"the chat template renders what leads up to message {index} differently when more messages follow: "
        f"from token {at} on it is {alone!r} alone and {together!r} within the conversation",
        where=name,
        why="the model would be trained on text that it does not see, or does not write, when it generates",
        fix="split the conversation so that each row ends with one assistant turn, "
        "or set model.custom_chat_template to a template that only appends",
    )

"""Rendering chat messages to token ids, and which of those tokens an assistant wrote.

The mask of a conversation is found from the template itself, in one of two ways:

1. The template marks assistant text with ``{% generation %}``: its marks are taken, and the end-of-sequence token that
   follows a marked span is added when the template left it outside.
2. Otherwise by rendering prefixes. For the assistant turn i of messages m, with ``full = render(m)``::

       before = render(m[:i], generation prompt)      what the model is given when it writes turn i
       after  = render(m[:i + 1])                     the conversation up to the end of turn i

   ``before`` must be a prefix of ``full``, as text and as tokens; the turn begins where it ends. Where ``after`` is such
   a prefix too, the turn ends with it, less the white space behind its last special token (the end-of-turn token).
   Where it is not, the template renders the turn differently once more messages follow (Qwen3 drops an empty ``<think>``
   block). The rule then: **the turn counts as it stands in the full conversation**, up to and with its end-of-turn token,
   provided that the message's content stands there unchanged. A template that alters the content, or anything before
   the turn, is refused: training would be on text that is not in the dataset or not in the model's context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hone.errors import DataError

Messages = list[dict[str, Any]]

_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, chat_template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of ``messages`` with the generation prompt: what the model is given to answer.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return render_prompts(tokenizer, [messages], chat_template_kwargs)[0]


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """:func:`render_prompt` of many conversations at once, tokenized together."""
    return _encode(tokenizer, _render(tokenizer, conversations, True, chat_template_kwargs))


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
    if _MARKS.search(_template(tokenizer)):
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
        encoded: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **(kwargs or {})
        )
    except _REFUSALS as error:
        raise _refused(error, name) from error
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    for i in range(1, len(ids)):
        if mask[i - 1] == 1 and mask[i] == 0 and ids[i] == tokenizer.eos_token_id != ids[i - 1]:
            mask[i] = 1
    if not any(mask):
        raise DataError("the chat template's {% generation %} block marks nothing", where=name, fix="mend the template")
    return ids, mask


# --------------------------------------------------------------------------------------------------- rendered prefixes


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    kwargs: dict[str, Any] | None,
    names: Sequence[str],
) -> list[tuple[list[int], list[int]]]:
    turns = [
        (number, index)
        for number, messages in enumerate(conversations)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    fulls = _render(tokenizer, conversations, False, kwargs)
    befores = _render(tokenizer, [conversations[n][:i] for n, i in turns], True, kwargs)
    last = [len(messages) - 1 for messages in conversations]
    inner = [(n, i) for n, i in turns if i != last[n]]  # the last turn ends with the conversation
    afters = dict(
        zip(inner, _render(tokenizer, [conversations[n][: i + 1] for n, i in inner], False, kwargs), strict=True)
    )
    full_ids = _encode(tokenizer, fulls)
    before_ids = _encode(tokenizer, befores)
    after_ids = dict(zip(inner, _encode(tokenizer, [afters[turn] for turn in inner]), strict=True))
    special = special_tokens(tokenizer)

    masks = [[0] * len(ids) for ids in full_ids]
    for (number, index), before, start_ids in zip(turns, befores, before_ids, strict=True):
        full, ids, name = fulls[number], full_ids[number], names[number]
        start = len(start_ids)
        if not full.startswith(before) or ids[:start] != start_ids:
            raise _rewritten(tokenizer, name, index, start_ids, ids)
        after, end_ids = afters.get((number, index), full), after_ids.get((number, index), ids)
        if full.startswith(after) and ids[: len(end_ids)] == end_ids:
            end = _trimmed(tokenizer, ids, start, len(end_ids), special)
        else:
            end = _end_in_full(tokenizer, ids, start, start_ids, end_ids, special)
            content = conversations[number][index].get("content")
            if end is None or (isinstance(content, str) and content.strip() not in _text(tokenizer, ids[start:end])):
                raise _rewritten(tokenizer, name, index, end_ids, ids)
        masks[number][start:end] = [1] * (end - start)
    return list(zip(full_ids, masks, strict=True))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, those of the chat template included."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _trimmed(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int, special: set[int]) -> int:
    """End of the turn ``ids[start:end]`` without the white space behind its last special token."""
    for last in range(end - 1, start - 1, -1):
        if ids[last] in special:
            return last + 1 if not _text(tokenizer, ids[last + 1 : end]).strip() else end
    return end


def _end_in_full(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    start: int,
    start_ids: list[int],
    end_ids: list[int],
    special: set[int],
) -> int | None:
    """End of a turn that reads differently in the full conversation: its end-of-turn token, counted from the start."""
    if end_ids[:start] != start_ids:
        return None
    alone = end_ids[start : _trimmed(tokenizer, end_ids, start, len(end_ids), special)]
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
    alone, together = _text(tokenizer, prefix[at : at + 8]), _text(tokenizer, full[at : at + 8])
    return DataError(
        f"the chat template renders what leads up to message {index} differently when more messages follow: "
        f"from token {at} on it is {alone!r} alone and {together!r} within the conversation",
        where=name,
        why="the model would be trained on text that it does not see, or does not write, when it generates",
        fix="split the conversation so that each row ends with one assistant turn, "
        "or set model.custom_chat_template to a template that only appends",
    )


# ----------------------------------------------------------------------------------------------------------- rendering


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError(
            "the tokenizer has no chat template, and the dataset holds messages",
            where=str(tokenizer.name_or_path),
            why="messages cannot be turned into one text",
            fix="set model.custom_chat_template=PATH, use the model's instruction-tuned version, or store prompts as strings",
        )
    return template


def _render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    generation_prompt: bool,
    kwargs: dict[str, Any] | None,
) -> list[str]:
    if not conversations:
        return []
    template = _template(tokenizer)
    try:
        texts: Any = tokenizer.apply_chat_template(
            list(conversations),
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **(kwargs or {}),
        )
    except _REFUSALS as error:
        raise _refused(error, "") from error
    return list(texts)


def _refused(error: Exception, name: str) -> DataError:
    return DataError(
        f"the chat template refuses the messages: {error}",
        where=name,
        why="they cannot be turned into one text",
        fix="check the roles and their order (user and assistant in turn), or set model.custom_chat_template",
    )


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return encoded["input_ids"]

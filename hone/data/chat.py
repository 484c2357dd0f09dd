"""Render chat messages to token ids with a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.data.template_limits import check_template
from hone.errors import DataError
from hone.text import is_valid

Messages = list[dict[str, Any]]

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, chat_template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Return the token ids of ``messages`` with the generation prompt, as the model's input.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return render_prompts(tokenizer, [messages], chat_template_kwargs)[0]


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Render many prompts at once, tokenized together; see :func:`render_prompt`."""
    return encode_texts(tokenizer, render_texts(tokenizer, conversations, True, chat_template_kwargs))


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError(
            "the tokenizer has no chat template, but the dataset has messages",
            where=str(tokenizer.name_or_path),
            why="messages cannot be rendered to one text",
            fix="set model.custom_chat_template=PATH, use the model's instruction-tuned version, or store prompts as strings",
        )
    return template


def render_texts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    generation_prompt: bool,
    kwargs: dict[str, Any] | None,
) -> list[str]:
    if not conversations:
        return []
    settings = {"chat_template": template_of(tokenizer), "add_generation_prompt": generation_prompt, **(kwargs or {})}
    conversations = in_parts(tokenizer, settings["chat_template"], conversations)
    parsed = [_with_parsed_arguments(messages) for messages in conversations]
    variables = {**tokenizer.special_tokens_map, "add_generation_prompt": generation_prompt, **(kwargs or {})}
    check_template(settings["chat_template"], parsed, variables, str(tokenizer.name_or_path))
    try:
        try:
            return list(tokenizer.apply_chat_template(parsed, tokenize=False, **settings))  # type: ignore[arg-type]
        except REFUSALS:
            if parsed == list(conversations):
                raise  # otherwise retry: the template may expect the arguments of calls as text
        return list(tokenizer.apply_chat_template(list(conversations), tokenize=False, **settings))  # type: ignore[arg-type]
    except REFUSALS as error:
        raise refused(error, "") from error


def in_parts(
    tokenizer: PreTrainedTokenizerBase, template: str, conversations: Sequence[Messages]
) -> Sequence[Messages]:
    """Return conversations with every text as a part of a message, if the template shows no other text, as some for images do."""
    if not _shows_only_parts(tokenizer, template):
        return conversations
    return [[_as_part(message) for message in messages] for messages in conversations]


def _as_part(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _shows_only_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    if "type" not in template:
        return False
    if template not in _PARTS_ONLY:
        chat = [{"role": "user", "content": _PROBE}]
        shown = [_PROBE in _probed(tokenizer, template, form) for form in (chat, [_as_part(chat[0])])]
        _PARTS_ONLY[template] = shown == [False, True]
    return _PARTS_ONLY[template]


def _probed(tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages) -> str:
    check_template(template, [messages], tokenizer.special_tokens_map, str(tokenizer.name_or_path))
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except REFUSALS:
        return ""


_PROBE = "hone probe"
_PARTS_ONLY: dict[str, bool] = {}


def _with_parsed_arguments(messages: Messages) -> Messages:
    """Parse the JSON arguments of tool calls to mappings, which most templates expect; files store them as text."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    return [
        {**m, "tool_calls": [_parsed(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages
    ]


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        parsed_arguments = json.loads(arguments) if isinstance(arguments, str) else None
    except json.JSONDecodeError:
        return call
    if not is_valid(parsed_arguments):
        return call  # the arguments of a malformed call stay text
    return (
        {**call, "function": {**function, "arguments": parsed_arguments}}
        if isinstance(parsed_arguments, dict) and function
        else call
    )


def refused(error: Exception, name: str) -> DataError:
    return DataError(
        f"the chat template refuses the messages: {error}",
        where=name,
        why="they cannot be rendered to one text",
        fix="check the roles and their order (user and assistant in turn), or set model.custom_chat_template",
    )


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return encoded["input_ids"]


def token_counts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens that :func:`encode_texts` produces for each text, without the tokens."""
    if not texts or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return [len(ids) for ids in encode_texts(tokenizer, texts)]
    encode_texts(tokenizer, texts[:1])  # resets truncation and padding settings of tokenizer.json
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [len(encoding) for encoding in encodings]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of all special tokens, including those of the chat template."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)

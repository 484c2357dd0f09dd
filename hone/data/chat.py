"""Render chat messages to token ids with a tokenizer's chat template, such that contents cannot forge special tokens.

A template inserts contents into text that is full of special tokens, and the tokenizer converts every ``<|im_end|>`` into the token,
regardless of its author. In prompts, text in contents that looks like a special token is hidden while the template runs, and is encoded
as ordinary text. In call arguments, tool results and schemas this includes every other named token (``<tool_call>``). Without such text,
the tokens are exactly those of ``apply_chat_template``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.data.files import Row
from hone.data.messages import as_json, as_mapping, with_arguments
from hone.data.proof import THOUGHT_KEYS, Missing, Shown, missing_part, texts_of
from hone.data.template_limits import Trace, check_template
from hone.errors import DataError

Messages = list[dict[str, Any]]

log = logging.getLogger(__name__)

_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "weight", "train", *THOUGHT_KEYS}
_UNREAD: set[str] = set()
_TOLD: set[str] = set()  # templates whose loss of reasoning was said
"""Keys that were named."""
_TRUSTED = ("system", "developer")
"""Roles whose contents may contain special tokens, since the operator of the model writes them."""
REFUSALS = (jinja2.TemplateError, ValueError, TypeError, AttributeError, ArithmeticError, LookupError)


@dataclass(frozen=True)
class Rendering:
    """A conversation as text."""

    text: str
    messages: Messages  # the messages in the form that the template shows whole
    trace: Trace | None  # where the template's loop begins each message; None where the rendering does not tell
    spans: list[tuple[int, int]]  # where the first part of each message begins and its last part ends
    dropped: int  # turns before the last whose reasoning the template leaves out
    missing: Missing | None = None  # what else the template leaves out, if that is allowed


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, chat_template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Return the token ids of ``messages`` with the generation prompt, as the model's input.

    Raises DataError: the tokenizer has no chat template, or the template refuses the messages or leaves out a part of them.
    """
    return render_prompts(tokenizer, [messages], chat_template_kwargs)[0]


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    chat_template_kwargs: dict[str, Any] | None = None,
    names: Sequence[str] = (),
) -> list[list[int]]:
    hidden = Hidden(special_pattern(tokenizer), any_of(named_tokens(tokenizer)))
    settings = dict(chat_template_kwargs or {})
    if settings.get("tools"):
        settings["tools"] = hidden.tools(settings["tools"])
    shown = [[hidden.message(message) for message in messages] for messages in conversations]
    texts = [one.text for one in render(tokenizer, shown, True, settings, names, hidden)]
    if not hidden.literals:
        return encode_texts(tokenizer, texts)
    return [encode_hidden(tokenizer, HiddenText(text, hidden.literals)) for text in texts]


def render_texts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    generation_prompt: bool,
    kwargs: dict[str, Any] | None,
    names: Sequence[str] = (),
) -> list[str]:
    return [one.text for one in render(tokenizer, conversations, generation_prompt, kwargs, names)]


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    generation_prompt: bool,
    kwargs: dict[str, Any] | None,
    names: Sequence[str] = (),
    hidden: Hidden | None = None,
) -> list[Rendering]:
    """Render conversations, and check that every part of every message is in the text.

    Templates differ in the form of messages that they show: content as a string or as parts, arguments of calls as mappings or as
    JSON text. Of these forms, the first that the template shows whole is rendered.

    Args:
        generation_prompt: True to end with the header of the assistant's turn.
        kwargs: additional arguments of the template, ``tools`` among them.
        hidden: what messages and tools stand for, if parts of them are hidden.

    Raises:
        DataError: there is no template; the template refuses a conversation, or leaves out a part of it.
    """
    if not conversations:
        return []
    settings = {"add_generation_prompt": generation_prompt, **(kwargs or {})}
    template = template_of(tokenizer, bool(settings.get("tools")))
    names = names or [""] * len(conversations)
    _name_unread_keys(template, conversations)
    pairs = zip(conversations, names, strict=True)
    special = special_pattern(tokenizer)
    renderings = [
        render_with(tokenizer, template, messages, settings, special, name, hidden=hidden) for messages, name in pairs
    ]
    dropped = sum(rendering.dropped for rendering in renderings)
    if dropped and template not in _TOLD:
        _TOLD.add(template)
        log.warning(
            "the chat template leaves out the reasoning of earlier turns: of %d in the first %d conversations",
            *(dropped, len(renderings)),
        )
    return renderings


def _name_unread_keys(template: str, conversations: Sequence[Messages]) -> None:
    """Warn once of keys of messages that neither Hone nor the template reads."""
    keys = {key for messages in conversations for message in messages for key in message} - _KEYS
    unread = frozenset(key for key in keys if key not in template)
    if unread - _UNREAD:
        log.warning("keys of messages that neither Hone nor the chat template reads: %s", ", ".join(sorted(unread)))
        _UNREAD.update(unread)


def render_as_is(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, generation_prompt: bool, kwargs: dict[str, Any] | None
) -> str | None:
    """Return the text of messages in the form of a checked :class:`Rendering`; None where the template refuses them."""
    settings = {"add_generation_prompt": generation_prompt, **(kwargs or {})}
    template = template_of(tokenizer, bool(settings.get("tools")))
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **settings))
    except REFUSALS:
        return None


_SLOT = "a question"


def strings_to_messages(
    rows: Sequence[Row], key: str, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any] | None = None
) -> tuple[int, list[str]]:
    """Put a user's message in place of each plain string in column ``key``; return their number.

    Also return the places of the strings that stay, because they hold special tokens, so were rendered before (for a template
    without any, because they hold the text next to a message). All stay without a template, or with one that refuses a single message.
    """
    wanted = [row for row in rows if isinstance(row.values.get(key), str) and row.values[key].strip()]
    if not wanted or tokenizer is None or not tokenizer.chat_template:
        return 0, []
    text = render_as_is(tokenizer, [{"role": "user", "content": _SLOT}], True, kwargs) or ""
    before, slot, after = text.partition(_SLOT)
    if not slot:
        return 0, []
    special = special_pattern(tokenizer)
    marks = [] if special.search(text) else [*before.strip().splitlines()[-1:], *after.strip().splitlines()[:1]]
    kept = []
    for row in wanted:
        if special.search(row.values[key]) or any(mark in row.values[key] for mark in marks):
            kept.append(row.where)
        else:
            row.values[key] = [{"role": "user", "content": row.values[key]}]
    return len(wanted) - len(kept), kept


def template_of(tokenizer: PreTrainedTokenizerBase, tools: bool = False) -> str:
    """Return the text of the chat template; of several, the one for conversations with or without tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    if not template:
        raise DataError(
            "the tokenizer has no chat template, but the dataset has messages",
            where=str(tokenizer.name_or_path),
            why="messages cannot be rendered to one text",
            fix="set model.custom_chat_template=PATH, use the model's instruction-tuned version, or store prompts as strings",
        )
    return template


def render_with(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Messages,
    settings: dict[str, Any],
    special: re.Pattern[str],
    name: str = "",
    *,
    whole: bool = True,
    hidden: Hidden | None = None,
) -> Rendering:
    """Render a conversation with a template, see :func:`render`. ``whole``: False to allow that parts are left out; the
    first form that the template takes is then rendered.
    """
    refusal: Exception | None = None
    missing: Missing | None = None
    first: Rendering | None = None
    for form in _forms(messages):
        (trace,) = check_template(
            template, [form], {**tokenizer.special_tokens_map, **settings}, str(tokenizer.name_or_path)
        )
        try:
            text: Any = tokenizer.apply_chat_template(form, tokenize=False, chat_template=template, **settings)
        except REFUSALS as error:
            refusal = refusal or error
            continue
        trace = trace if trace is not None and trace.text == text else None
        starts = trace.starts if trace else [None] * len(form)
        shown = missing_part(text, starts, form, settings.get("tools") or (), special)
        if isinstance(shown, Shown):
            return Rendering(text, form, trace, shown.spans, shown.dropped)
        if first is None and not whole:  # what the assistant said is the lesser loss
            others = missing_part(text, starts, form, settings.get("tools") or (), special, passed_over=("assistant",))
            lost = others if isinstance(others, Missing) else shown
            first = Rendering(text, form, trace, [], 0, lost if hidden is None else hidden.plain(lost))
        if missing is None or (shown.message or 0) > (missing.message or 0):
            missing = shown if hidden is None else hidden.plain(shown)
    if first is not None and not whole:
        return first
    if missing is not None:
        raise left_out(missing, messages, name)
    raise DataError(
        f"the chat template refuses the messages: {refusal}",
        where=name,
        why="they cannot be rendered to one text",
        fix="check the roles and their order (user and assistant in turn)"
        + (
            ", and that each call has an id, function.name and function.arguments"
            if any(m.get("tool_calls") for m in messages)
            else ""
        )
        + ", or set model.custom_chat_template",
    ) from refusal


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the forms of a conversation in which a template may expect it, the most usual first; all mean the same."""
    named = [_with_reasoning(message) for message in messages]
    joined, parts = [_as_text(message) for message in named], [_as_parts(message) for message in named]
    seen: list[Messages] = []
    for content in (joined, parts):
        for arguments in (as_mapping, as_json):
            form = [with_arguments(message, arguments) for message in content]
            if form not in seen:
                seen.append(form)
                yield form


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under each name that templates read, as newer versions of transformers give it."""
    thoughts = next((message[key] for key in THOUGHT_KEYS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one string, unless it has other parts than text."""
    content = message.get("content")
    texts = texts_of(content)
    if not isinstance(content, list) or len(texts) < len(content):
        return message
    return {**message, "content": "".join(texts)}


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str | list):
        return message
    parts = content if isinstance(content, list) else [content]
    return {**message, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def left_out(missing: Missing, messages: Sequence[Mapping[str, Any]], name: str) -> DataError:
    """Return the error of a conversation that a template does not show whole; ``name`` is its source."""
    role = "" if missing.message is None else f" (role {messages[missing.message]['role']})"
    fixes = {
        "tool": "use a template that shows tools",
        "call": "use a template that shows tool calls, or remove the rows with calls",
        "argument": "use a template that shows the arguments of calls, or remove the rows with calls",
        "reasoning": "write the reasoning into the content, use a template that shows it, or remove it from the rows",
        "text": "use a template that shows the text unchanged, or remove the rows",
    }
    return DataError(
        f"the chat template leaves out {missing}{role}",
        where=name,
        why="the model would read or learn a conversation that is not the one of the file",
        fix=f"{fixes[missing.what]}: model.custom_chat_template=PATH",
        code="E-left-out",
    )


class HiddenText:
    """Rendering in which each character of ``hidden`` stands for ordinary text."""

    def __init__(self, text: str, hidden: Mapping[str, str]) -> None:
        self.text, self.hidden = text, hidden

    def __str__(self) -> str:
        return self.text.translate(str.maketrans(dict(self.hidden)))

    def spans(self) -> list[str]:
        """Split the text at its placeholders, which become separate strings."""
        if not self.hidden:
            return [self.text] if self.text else []
        return [span for span in re.split(f"([{''.join(self.hidden)}])", self.text) if span]

    def __getitem__(self, where: slice) -> HiddenText:
        return HiddenText(self.text[where], self.hidden)


class Hidden:
    """Replacement of text that looks like a named token by a character that no text can contain (a lone surrogate)."""

    def __init__(self, special: re.Pattern[str], named: re.Pattern[str]) -> None:
        self._special, self._named = special, named
        self.literals: dict[str, str] = {}
        self._characters: dict[str, str] = {}

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with such text replaced, unless its role may contain special tokens."""
        role = message.get("role")
        if role in _TRUSTED:
            return message
        strict = {"tool_calls", "content"} if role == "tool" else {"tool_calls"}
        return {
            key: self._value(value, self._named if key in strict else self._special) for key, value in message.items()
        }

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return function schemas with such text replaced: servers of others write them."""
        return [self._value(tool, self._named) for tool in tools]

    def plain(self, missing: Missing) -> Missing:
        """Return a part that a rendering lacks with the text that its message has."""
        return replace(missing, text=str(HiddenText(missing.text, self.literals)))

    def _value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._character(match[0]), value)
        if isinstance(value, Mapping):
            return {self._value(key, pattern): self._value(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item, pattern) for item in value]
        return value

    def _character(self, literal: str) -> str:
        if literal not in self._characters:
            character = chr(0xD800 + len(self._characters))
            self._characters[literal], self.literals[character] = character, literal
        return self._characters[literal]


def encode_hidden(tokenizer: PreTrainedTokenizerBase, text: HiddenText) -> list[int]:
    """Return the token ids of a rendering, hidden text as ordinary tokens."""
    ids: list[int] = []
    for span in text.spans():
        literal = text.hidden.get(span)
        if literal is None:
            ids += encode_texts(tokenizer, [span])[0]
        else:
            ids += _spelled(tokenizer, literal)
    return ids


def _spelled(tokenizer: PreTrainedTokenizerBase, literal: str) -> list[int]:
    """Return ordinary tokens for a text that equals a token's name."""
    encoded: Any = tokenizer(literal, add_special_tokens=False, split_special_tokens=True)
    if tokenizer.convert_tokens_to_ids(literal) not in encoded["input_ids"]:
        return list(encoded["input_ids"])
    first, rest = encode_texts(tokenizer, [literal[:1], literal[1:]])  # a named token that is not special
    return [*first, *rest]


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


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return the pattern of all special tokens."""
    return any_of(str(tokenizer.convert_ids_to_tokens(token)) for token in special_tokens(tokenizer))


def any_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of some texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)")


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens, special or not, by name."""
    named: Any = tokenizer.added_tokens_encoder
    return dict(named)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of all special tokens, including those of the chat template."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)

"""Rendering of a conversation as token ids to which tokens are only appended.

    prompt(messages, tools)          a segment's prompt                 [system, user, generation prompt]
      + sampled ids                  the reply, unchanged               [... <|im_end|>]
      + bridge(sampled, results)     tokens before the next reply       [tool results, generation prompt]
      + sampled ids ...

Sampled tokens are never decoded and tokenized again: the new tokens could differ from those with the recorded log-probs. The tokens
after a turn are those that the template writes after the assistant turn of a short placeholder conversation. So no template has to
be reimplemented.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import AssistantTurn, Message
from hone.agents.parsers.base import TOOL_PARSERS, ToolParser
from hone.agents.rendering.template import (
    Ending,
    Template,
    cut_at,
    marked,
    parser_that_reads,
    probe_conversations,
    shows_tools,
)
from hone.data.chat import HiddenText, named_tokens
from hone.data.tokenizer import decoded
from hone.errors import DataError, ModelError, UnknownMethod, did_you_mean
from hone.registry import Registry

_SHOWN_CHARACTERS = 40
_CONTEXT_CHARACTERS = 20
EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*|<\|channel>thought\s*<channel\|>\s*")


@dataclass(frozen=True)
class Difference:
    """First difference between a conversation's tokens and a fresh rendering of its messages."""

    # ``tokenization`` (same text, other tokens), ``strippable`` (white space, empty thoughts or end marks) or ``text``
    kind: Literal["tokenization", "strippable", "text"]
    position: int  # index of the first token that differs
    played: str  # text from there on as played
    rendered: str  # text from there on as the template renders it


def compare(
    tokenizer: PreTrainedTokenizerBase, played: list[int], rendered: list[int], closers: Sequence[str]
) -> Difference | None:
    """Return the first difference, or None if both agree except for the end of the last turn."""
    position = next(
        (at for at, (a, b) in enumerate(zip(played, rendered, strict=False)) if a != b), min(len(played), len(rendered))
    )
    a, b = (decoded(tokenizer, ids[position:]) for ids in (played, rendered))
    if position == min(len(played), len(rendered)) and not _normalized(a + b, closers):
        return None
    whole = [decoded(tokenizer, ids) for ids in (played, rendered)]
    kind: Literal["tokenization", "strippable", "text"] = "text"
    if whole[0].rstrip() == whole[1].rstrip():
        kind = "tokenization"
    elif _normalized(whole[0], closers) == _normalized(whole[1], closers):
        kind = "strippable"
    return Difference(kind, position, a[:_SHOWN_CHARACTERS], b[:_SHOWN_CHARACTERS])


def _normalized(text: str, closers: Sequence[str]) -> str:
    """Return the text without white space, end-of-turn marks and empty reasoning blocks."""
    text = EMPTY_THOUGHTS.sub("", text)
    for closer in closers:
        text = text.replace(closer, "")
    return "".join(text.split())


def rewritten(before: str, after: str, played: str | None, closers: Sequence[str]) -> str | None:
    """Describe how the rendering ``after`` new messages changes earlier turns; return None if it only appends.

    If it begins with what the model saw and wrote (``played``), nothing was rewritten. Text after the last closer is ignored,
    and so is an empty reasoning block: some templates write one before the last answer only, to request one without reasoning.
    """
    before, after = EMPTY_THOUGHTS.sub("", before), EMPTY_THOUGHTS.sub("", after)
    closed_text = _up_to_end(before, closers)
    if after.startswith(closed_text):
        return None
    if played is not None and after.startswith(_without_end(EMPTY_THOUGHTS.sub("", played), closers)):
        return None
    position = len(os.path.commonprefix([closed_text, after]))
    position = max(position - _CONTEXT_CHARACTERS, *(closed_text.rfind(edge, 0, position) for edge in "<\n "), 0)
    return (
        f"the chat template changes earlier turns when messages follow: "
        f"{closed_text[position : position + _SHOWN_CHARACTERS]!r} becomes {after[position : position + _SHOWN_CHARACTERS]!r} (character {position})"
    )


def _up_to_end(text: str, closers: Sequence[str]) -> str:
    end = max((text.rfind(closer) for closer in closers), default=-1)
    return text.rstrip() if end < 0 else text[:end]


def _without_end(text: str, closers: Sequence[str]) -> str:
    text = text.rstrip()
    for closer in closers:
        text = text.removesuffix(closer)
    return text


@dataclass(frozen=True)
class Family:
    """Chat format shared by a family of models."""

    name: str  # value of ``multi_turn.renderer``
    signature: tuple[str, ...] = ()  # tokens in every vocabulary of this family
    # tokens that end an assistant turn in a template's rendering, in groups of equivalent tokens
    closers: tuple[tuple[str, ...], ...] = ()
    stops: tuple[str, ...] = ()  # tokens at which generation ends
    parser: str = "hermes"  # format of tool calls if the template does not write calls
    # True if the template names a result after the last call before it, so that each result is rendered after a
    # separate call
    results_one_by_one: bool = False


FAMILIES: Registry[Family] = Registry("renderer", key="actor_rollout_ref.rollout.multi_turn.renderer")
"""Families by name."""

for _family in (
    Family(
        "harmony",
        signature=("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),
        closers=(("<|end|>", "<|return|>", "<|call|>"),),
        stops=("<|return|>", "<|call|>"),
        parser="harmony",
        results_one_by_one=True,
    ),
    Family(
        "deepseek",
        signature=("<｜User｜>", "<｜Assistant｜>"),
        closers=(("<｜end▁of▁sentence｜>",),),
        stops=("<｜end▁of▁sentence｜>",),
        parser="deepseek",
    ),
    Family(
        "kimi",
        signature=("<|im_middle|>", "<|im_assistant|>"),
        closers=(("<|im_end|>",),),
        stops=("<|im_end|>",),
        parser="kimi",
    ),
    Family(
        "llama3",
        signature=("<|start_header_id|>", "<|eot_id|>"),
        closers=(("<|eot_id|>", "<|eom_id|>"),),
        stops=("<|eot_id|>", "<|eom_id|>"),
        parser="llama3_json",
    ),
    Family(
        "gemma4",
        signature=("<|turn>", "<turn|>"),
        closers=(("<turn|>",), ("<|tool_response>",)),
        stops=("<turn|>", "<|tool_response>"),
        parser="gemma",
    ),
    Family(
        "gemma",
        signature=("<start_of_turn>", "<end_of_turn>"),
        closers=(("<end_of_turn>",), ("<start_function_response>",)),
        stops=("<end_of_turn>", "<start_function_response>"),
        parser="gemma",
    ),
    Family(
        "qwen",
        signature=("<|im_start|>", "<|im_end|>"),
        closers=(("<|im_end|>",),),
        stops=("<|im_end|>", "<|endoftext|>"),
        parser="hermes",
    ),
    Family("generic"),
):
    FAMILIES.register(_family.name)(_family)

_MOST_SPECIFIC_FIRST = ("harmony", "deepseek", "kimi", "llama3", "gemma4", "gemma", "qwen")


def family_of(tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family whose signature tokens the vocabulary has, else ``generic``."""
    token_ids = named_tokens(tokenizer)
    for name in _MOST_SPECIFIC_FIRST:
        family = FAMILIES.get(name)
        if all(token in token_ids for token in family.signature):
            return family
    return FAMILIES.get("generic")


def family_called(name: str, tokenizer: PreTrainedTokenizerBase) -> Family:
    """Return the family called ``name``, or the tokenizer's family for ``auto``.

    Raises:
        ModelError: the vocabulary lacks tokens of that family.
    """
    if name == "auto":
        return family_of(tokenizer)
    if name not in FAMILIES:
        raise UnknownMethod(
            f"unknown renderer '{name}'",
            where="actor_rollout_ref.rollout.multi_turn.renderer",
            fix=did_you_mean(name, [*FAMILIES.names(), "auto", "text_tools"]),
        )
    family = FAMILIES.get(name)
    missing = [token for token in family.signature if token not in named_tokens(tokenizer)]
    if missing:
        raise ModelError(
            f"renderer '{name}' needs the token {missing[0]}, which the tokenizer does not have",
            where=str(tokenizer.name_or_path),
            why="turns would not begin and end as the model was trained",
            fix="actor_rollout_ref.rollout.multi_turn.renderer=auto",
        )
    return family


Tools = Sequence[Mapping[str, Any]] | None


class Continuation:
    """Computation of the tokens that a template writes after an assistant turn.

    ``closers`` are the tokens that end one, in groups of equivalent tokens.
    """

    def __init__(self, template: Template, closers: list[list[str]], *, shows_tools: bool) -> None:
        self._template, self._closers, self._shows_tools = template, closers, shows_tools
        self._token_ids = named_tokens(template.tokenizer)

    def ids(
        self, sampled_ids: Sequence[int], groups: list[list[Message]], tools: Tools, ending: Ending = Ending.REPLY
    ) -> list[int]:
        """Return the tokens after a sampled turn: its end unless sampled, the messages, the generation prompt.

        Each group of messages is rendered after a separate turn.

        Raises:
            DataError: the template refuses the messages or omits them.
        """
        ids: list[int] = []
        for number, group in enumerate(groups):
            closer, tail = self._after_turn(group, tools, ending if number == len(groups) - 1 else Ending.CLOSED)
            encoded = self._template.encode(HiddenText(closer + tail.text, tail.hidden))
            ended = number > 0 or (bool(sampled_ids) and sampled_ids[-1] in self._equivalent_ids(closer))
            ids += encoded[1:] if closer and ended else encoded
        return ids

    def _equivalent_ids(self, closer: str) -> list[int]:
        return [self._token_ids[token] for group in self._closers if closer in group for token in group]

    def _after_turn(self, new: list[Message], tools: Tools, ending: Ending) -> tuple[str, HiddenText]:
        """Return the token that ends an assistant turn ("" if none) and the rendering after it."""
        mark = _PLACEHOLDER
        while any(mark in str(message.get("content")) for message in new):
            mark += "."
        rendered, end = marked(new) if ending is Ending.OPEN else (new, "")
        shown, start = self._render_placeholder(mark, rendered, tools, ask=ending is Ending.REPLY)
        if ending is Ending.OPEN:
            shown = cut_at(shown, end, str(self._template.tokenizer.name_or_path))
        for message in new[:-1] if ending is Ending.OPEN else new:
            self._check_shown(message, shown.text[start:])
        positions = [(shown.text.find(closer, start), closer) for group in self._closers for closer in group]
        position, closer = min(((at, closer) for at, closer in positions if at >= 0), default=(start, ""))
        return closer, shown[position + len(closer) :]

    def _render_placeholder(self, mark: str, new: list[Message], tools: Tools, *, ask: bool) -> tuple[HiddenText, int]:
        """Render a short conversation with the new messages after an assistant turn; also return the end of that turn's text."""
        calls = [_call(message, mark) for message in new if message["role"] == "tool"]
        turns: list[Message] = [{"role": "assistant", "content": mark}]
        if calls and self._closers:  # first try a turn with calls, since results answer calls
            turns.insert(0, {"role": "assistant", "content": "", "tool_calls": calls})
        refusal: DataError | None = None
        for turn in turns:
            try:
                shown = self._template.text([_QUESTION, turn, *new], tools if self._shows_tools else None, ask=ask)
            except DataError as error:
                refusal = refusal or error
                continue
            if mark in shown.text:
                return shown, shown.text.rindex(mark) + len(mark)
        raise refusal or DataError(
            "the chat template omits the assistant's text",
            where=str(self._template.tokenizer.name_or_path),
            why="the tokens after an assistant turn cannot be determined",
            fix="use another template with actor_rollout_ref.model.custom_chat_template=PATH",
        )

    def _check_shown(self, message: Message, tail: str) -> None:
        """Check that the rendering contains the longest word of a message, if that word is plain ASCII."""
        content = message.get("content")
        words = content.split() if isinstance(content, str) else []
        word = max(words, key=len, default="")
        if word and word.isascii() and word.isalnum() and word not in tail:
            raise DataError(
                f"the chat template omits a message of role '{message['role']}': '{word[:40]}' is not in its text",
                where=str(self._template.tokenizer.name_or_path),
                why="the model would have to continue without it",
                fix="actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or use another template with "
                "actor_rollout_ref.model.custom_chat_template=PATH",
                code="R35",
            )


def by_result(messages: list[Message]) -> list[list[Message]]:
    """Split messages into groups, one per tool result."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool" and groups[-1]:
            groups.append([])
        groups[-1].append(message)
    return groups


def closers_of(template: Template) -> tuple[tuple[str, ...], ...]:
    """Return the special token that a template writes after an assistant turn; empty for plain text."""
    turns = [_QUESTION, {"role": "assistant", "content": _PLACEHOLDER}]
    _, has_turn, after = template.text(turns, ask=False).text.partition(_PLACEHOLDER)
    literals = [str(template.tokenizer.convert_ids_to_tokens(index)) for index in template.special]
    following = [(after.find(literal), literal) for literal in literals if literal in after]
    return ((min(following)[1],),) if has_turn and following else ()


def _call(message: Message, mark: str) -> dict[str, Any]:
    """Return a call for the tool message to answer."""
    function = {"name": message.get("name") or "unknown", "arguments": {"value": mark}}
    return {"id": message.get("tool_call_id") or "call_0", "type": "function", "function": function}


_INTRODUCTION = """You may call functions. Their signatures:
<tools>
{schemas}
</tools>

For each call write a JSON object with the function's name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def conversation_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, system: bool, special: re.Pattern[str]
) -> list[Message]:
    """Return a conversation whose tools, calls and results are written into message contents.

    Schemas, in the first message, cannot forge ``special`` tokens: their first character is written as JSON's escape. Without
    ``system`` messages the first user message begins with the tools.
    """
    converted = messages_as_text(messages)
    if not tools:
        return converted
    schemas = "\n".join(
        special.sub(lambda name: f"\\u{ord(name[0][0]):04x}{name[0][1:]}", json.dumps(dict(tool), ensure_ascii=False))
        for tool in tools
    )
    introduction = _INTRODUCTION.format(schemas=schemas)
    first = converted[0] if converted else None
    if first is not None and (first["role"] == "system" or not system):
        if isinstance(first["content"], list):
            content: Any = [{"type": "text", "text": f"{introduction}\n\n"}, *first["content"]]
        elif first["role"] == "system":
            content = f"{first['content']}\n\n{introduction}"
        else:
            content = f"{introduction}\n\n{first['content']}"
        converted[0] = {**first, "content": content}
        return converted
    return [{"role": "system", "content": introduction}, *converted]


def messages_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls into message contents, and each run of results into one user message."""
    converted: list[Message] = []
    results: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message.get("content") or "")
            continue
        _append_results(converted, results)
        calls = message.get("tool_calls")
        if calls:
            text = "\n".join([*filter(None, [message.get("content")]), *map(_call_as_text, calls)])
            message = {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}
        converted.append(message)
    _append_results(converted, results)
    return converted


def _append_results(converted: list[Message], results: list[Any]) -> None:
    if results and all(isinstance(result, str) for result in results):
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        converted.append({"role": "user", "content": text})
    elif results:
        parts: list[dict[str, Any]] = []
        for number, result in enumerate(results):
            content = [{"type": "text", "text": result}] if isinstance(result, str) else result
            opening = {"type": "text", "text": "\n" * (number > 0) + "<tool_response>\n"}
            parts += [opening, *content, {"type": "text", "text": "\n</tool_response>"}]
        converted.append({"role": "user", "content": parts})
    results.clear()


def _call_as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {text}}}\n</tool_call>'


_PLACEHOLDER = "hone stand-in"
_QUESTION: Message = {"role": "user", "content": "?"}


class Renderer:
    """Renderer of conversations for one tokenizer, made by :func:`~hone.agents.rendering.renderer_for`.

    Args:
        template: the tokenizer's chat template.
        tools_as_text: True if tools, calls and results are written into contents, for templates without tools.
    """

    def __init__(self, template: Template, family: Family, parser: ToolParser, *, tools_as_text: bool = False) -> None:
        self.template, self.family, self.parser, self.tools_as_text = template, family, parser, tools_as_text
        groups = family.closers or closers_of(template)
        token_ids = named_tokens(template.tokenizer)
        named = [[token for token in group if token in token_ids] for group in groups]
        self._continuation = Continuation(template, [group for group in named if group], shows_tools=not tools_as_text)
        # tokens with which the template ends an assistant turn
        self.closers: list[str] = [token for group in named for token in group]
        self.closer_ids: list[int] = [token_ids[token] for token in self.closers]  # ids of the closers
        eos = template.tokenizer.eos_token_id
        stops = [token_ids[token] for token in family.stops if token in token_ids] if family.stops else self.closer_ids
        # tokens at which generation ends
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*stops, *([eos] if isinstance(eos, int) else [])]))
        self._checked_tools: set[tuple[str, ...]] = set()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.template.tokenizer

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        ending: Ending = Ending.REPLY,
    ) -> list[int]:
        """Return the token ids of a complete conversation.

        Raises:
            DataError: the template refuses the messages, or omits the tools or the message to continue.
        """
        if ending is Ending.OPEN:
            messages, mark = marked(messages)
            rendered = cut_at(self.rendered(messages, tools, ask=False), mark, str(self.tokenizer.name_or_path))
        else:
            rendered = self.rendered(messages, tools, ask=ending is Ending.REPLY)
        self._check_tools(tools, rendered.text)
        return self.template.encode(rendered)

    def bridge(
        self,
        sampled_ids: Sequence[int],  # the last assistant turn as it was sampled
        # one or more of role tool (with ``name`` and ``tool_call_id``), user or system; then the assistant's message to
        # continue, with an open ending
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,  # function schemas
        ending: Ending = Ending.REPLY,  # end after the last message
    ) -> list[int]:
        """Return the token ids to append after a sampled turn so that the model can reply again.

        They are the end of the assistant turn unless it was sampled (a truncated turn lacks it), the new messages, and the
        generation prompt.

        Raises:
            DataError: the template refuses the messages or omits them.
            ValueError: there are no new messages, or one is an assistant's that is not to be continued.
        """
        complete = new_messages[:-1] if ending is Ending.OPEN else new_messages
        if not complete or any(message["role"] == "assistant" for message in complete):
            raise ValueError("a bridge needs at least one new message and no assistant message")
        new = messages_as_text(new_messages) if self.tools_as_text else list(new_messages)
        results = sum(message["role"] == "tool" for message in new)
        if results > 1 and self.family.results_one_by_one:
            return self._continuation.ids(sampled_ids, by_result(new), tools, ending)
        try:
            return self._continuation.ids(sampled_ids, [new], tools, ending)
        except DataError:
            if results < 2:
                raise
            return self._continuation.ids(
                sampled_ids, by_result(new), tools, ending
            )  # for templates that accept one call at a time

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        calls_before: int = 0,
        prompt_ids: Sequence[int] | None = None,
    ) -> AssistantTurn:
        """Parse a sampled turn after ``prompt_ids``, which may open a reasoning block; None means the first turn's prompt.

        ``calls_before``, the number of calls earlier in the conversation, keeps call ids unique.
        """
        thinking = self.opens_thoughts if prompt_ids is None else self.is_thinking(prompt_ids)
        return self.parser.parse(sampled_ids, tools, calls_before=calls_before, thinking=thinking)

    def is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends inside a reasoning block."""
        opening, closing = self.parser.thoughts
        text = decoded(self.tokenizer, list(prompt_ids)[-8:])
        return opening in text and text.rfind(opening) > text.rfind(closing)

    def turn_ended(self, sampled_ids: Sequence[int]) -> bool:
        """Return whether a sampled turn ended with an end token, not at a limit."""
        ends = {*self.stop_token_ids, *self.closer_ids}
        return bool(sampled_ids) and sampled_ids[-1] in ends

    def split_reason(
        self,
        messages: Sequence[Message],  # the conversation, the last assistant turn included
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,  # function schemas
        *,
        history_ids: Sequence[int],  # all token ids of the conversation so far
    ) -> str | None:
        """Return why the new messages cannot be appended to the played tokens, or None if they can.

        They cannot if the template changes earlier turns when the messages follow (for example, removes their reasoning). A model
        served through the template would then never see the played tokens. In that case the training sample ends before the new
        messages, and a new one begins with ``prompt(messages + new_messages)``. Empty reasoning blocks are ignored.
        """
        if not self.rewrites:
            return None
        before = self.rendered(messages, tools, ask=False).text
        after = self.rendered([*messages, *new_messages], tools).text
        return rewritten(before, after, decoded(self.tokenizer, history_ids), self.closers)

    def sanity_check(
        self,
        ids: Sequence[int],  # all token ids of the conversation
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,  # function schemas
        mode: str = "strict",  # ``strict``, ``ignore_strippable`` (ignores white space and end marks) or ``disable``
    ) -> Difference | None:
        """Compare the tokens of a finished conversation with the template's rendering; return the first difference, or None.

        A difference is not an error: training uses the sampled tokens. It shows how far the model deviates from the template's
        format.
        """
        if mode == "disable":
            return None
        expected = self.template.encode(self.rendered(messages, tools, ask=False))
        difference = compare(self.tokenizer, list(ids), expected, self.closers)
        if mode == "ignore_strippable" and difference is not None and difference.kind == "strippable":
            return None
        return difference

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, ask: bool = True
    ) -> HiddenText:
        return self.template.text(*self.as_shown(messages, tools), ask=ask)

    def as_shown(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and tools that the template gets: unchanged, or messages with tools, calls and results as text."""
        if not self.tools_as_text:
            return messages, tools
        special = self.template.special_text
        return conversation_as_text(messages, tools, system=self._takes_system_message, special=special), None

    @cached_property
    def rewrites(self) -> bool:
        """True if the template changes a turn when more messages follow, by trying example conversations."""
        for messages, new in probe_conversations():
            try:
                before, after = self.rendered(messages, ask=False).text, self.rendered([*messages, *new]).text
            except DataError:
                continue  # the template refuses such a conversation
            if rewritten(before, after, None, self.closers) is not None:
                return True
        return False

    @cached_property
    def opens_thoughts(self) -> bool:
        """True if the generation prompt ends inside a reasoning block."""
        return self.is_thinking(self.template.encode(self.rendered([_QUESTION])))

    @cached_property
    def _takes_system_message(self) -> bool:
        try:
            shown = self.template.text([{"role": "system", "content": _PLACEHOLDER}, _QUESTION])
        except DataError:
            return False
        return _PLACEHOLDER in shown.text

    def _check_tools(self, tools: Sequence[Mapping[str, Any]] | None, shown: str) -> None:
        names = tuple(str(tool.get("function", tool).get("name")) for tool in tools or ())
        if names in self._checked_tools:
            return
        missing = [name for name in names if name not in shown]
        if missing:
            raise DataError(
                f"the chat template ignores tools: '{missing[0]}' does not occur in the rendered prompt",
                where=str(self.tokenizer.name_or_path),
                why="the model would not see its tools and never call them",
                fix="actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or use a template with tools "
                "(actor_rollout_ref.model.custom_chat_template=PATH)",
                code="R35",
            )
        self._checked_tools.add(names)


TEXT_TOOLS = "text_tools"
"""Name of the renderer that writes tools into message contents, for any family."""


def renderer_for(
    tokenizer: PreTrainedTokenizerBase,
    name: str = "auto",
    *,
    parser: str = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
) -> Renderer:
    """Return the renderer of a tokenizer.

    Args:
        name: a family (``qwen``, ``llama3``, ``gemma``, ``gemma4``, ``harmony``, ``deepseek``, ``kimi``, ``generic``), ``auto``
            (chosen by the vocabulary's tokens), or ``text_tools`` for templates without tools.
        parser: format of tool calls, ``auto`` for the parser that reads the template's calls.
        template_kwargs: extra arguments of the template (``enable_thinking`` and the like).

    Raises:
        DataError: the tokenizer has no chat template.
        ModelError: the tokenizer lacks the tokens of the named family.
    """
    template = Template(tokenizer, template_kwargs)
    if name == TEXT_TOOLS:
        read = TOOL_PARSERS.get("hermes" if parser == "auto" else parser)(tokenizer)
        return Renderer(template, family_of(tokenizer), read, tools_as_text=True)
    family = family_called(name, tokenizer)
    as_text = family.name == "gemma" and not shows_tools(template)  # Gemma 2 and 3
    if parser == "auto":
        parser = "hermes" if as_text else parser_that_reads(template, family.parser)
    return Renderer(template, family, TOOL_PARSERS.get(parser)(tokenizer), tools_as_text=as_text)

"""Tokens that follow an assistant turn, taken from a template's rendering of a placeholder conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.agents.messages import Message
from hone.agents.parsers.base import named_tokens
from hone.agents.rendering.ending import Ending, cut_at, marked
from hone.agents.rendering.template import HiddenText, Template
from hone.errors import DataError

_PLACEHOLDER = "hone stand-in"
_QUESTION: Message = {"role": "user", "content": "?"}
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

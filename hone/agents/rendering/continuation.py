"""What stands behind an assistant turn: cut out of a template's rendering of a short stand-in conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.agents.messages import Message
from hone.agents.parsers.base import named_tokens
from hone.agents.rendering.template import HiddenText, Template
from hone.errors import DataError

_STAND_IN = "hone stand-in"
_QUESTION: Message = {"role": "user", "content": "?"}
Tools = Sequence[Mapping[str, Any]] | None


class Continuation:
    """Finds what a template puts behind an assistant turn.

    Args:
        template: the chat template.
        closers: tokens that end an assistant turn, in groups that mean the same.
        shows_tools: whether the template is given the tools.
    """

    def __init__(self, template: Template, closers: list[list[str]], *, shows_tools: bool) -> None:
        self._template, self._closers, self._shows_tools = template, closers, shows_tools
        self._known = named_tokens(template.tokenizer)

    def ids(self, sampled_ids: Sequence[int], groups: list[list[Message]], tools: Tools) -> list[int]:
        """Return the tokens behind a sampled turn: its end where it was not sampled, the messages, the generation prompt.

        Args:
            sampled_ids: the turn.
            groups: the messages; each group is rendered behind a turn of its own.
            tools: function schemas.

        Raises:
            DataError: the template refuses the messages or leaves them out.
        """
        ids: list[int] = []
        for number, group in enumerate(groups):
            closer, tail = self._behind_a_turn(group, tools, ask=number == len(groups) - 1)
            encoded = self._template.encode(HiddenText(closer + tail.text, tail.hidden))
            ended = number > 0 or (bool(sampled_ids) and sampled_ids[-1] in self._same_as(closer))
            ids += encoded[1:] if closer and ended else encoded
        return ids

    def _same_as(self, closer: str) -> list[int]:
        return [self._known[token] for group in self._closers if closer in group for token in group]

    def _behind_a_turn(self, new: list[Message], tools: Tools, *, ask: bool) -> tuple[str, HiddenText]:
        """The token that ends an assistant turn ("" where a template has none), and the rendering behind it."""
        mark = _STAND_IN
        while any(mark in str(message.get("content")) for message in new):
            mark += "."
        shown, start = self._stand_in(mark, new, tools, ask=ask)
        for message in new:
            self._check_shown(message, shown.text[start:])
        found = [(shown.text.find(closer, start), closer) for group in self._closers for closer in group]
        position, closer = min(((at, closer) for at, closer in found if at >= 0), default=(start, ""))
        return closer, shown[position + len(closer) :]

    def _stand_in(self, mark: str, new: list[Message], tools: Tools, *, ask: bool) -> tuple[HiddenText, int]:
        """A short conversation with the new messages behind an assistant turn, and where in it that turn's text ends."""
        calls = [_call(message, mark) for message in new if message["role"] == "tool"]
        turns: list[Message] = [{"role": "assistant", "content": mark}]
        if calls and self._closers:  # first with calls, as it is calls whose results are shown
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
            "the chat template leaves the assistant's text out",
            where=str(self._template.tokenizer.name_or_path),
            why="what follows it cannot be found",
            fix="another template with actor_rollout_ref.model.custom_chat_template=PATH",
        )

    def _check_shown(self, message: Message, tail: str) -> None:
        """See that the longest word of a message is in the rendering, where templates have no reason to change it."""
        content = message.get("content")
        words = content.split() if isinstance(content, str) else []
        word = max(words, key=len, default="")
        if word and word.isascii() and word.isalnum() and word not in tail:
            raise DataError(
                f"the chat template leaves out a message of role '{message['role']}': '{word[:40]}' is not in its text",
                where=str(self._template.tokenizer.name_or_path),
                why="the model would be asked to go on without it",
                fix="actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or another template with "
                "actor_rollout_ref.model.custom_chat_template=PATH",
                code="R35",
            )


def by_result(messages: list[Message]) -> list[list[Message]]:
    """Return the messages in groups that begin with each tool's result."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool" and groups[-1]:
            groups.append([])
        groups[-1].append(message)
    return groups


def closers_of(template: Template) -> tuple[tuple[str, ...], ...]:
    """Return the special token that a template puts behind an assistant turn, none where it puts plain text there."""
    turns = [_QUESTION, {"role": "assistant", "content": _STAND_IN}]
    _, found, behind = template.text(turns, ask=False).text.partition(_STAND_IN)
    literals = [str(template.tokenizer.convert_ids_to_tokens(index)) for index in template.special]
    following = [(behind.find(literal), literal) for literal in literals if literal in behind]
    return ((min(following)[1],),) if found and following else ()


def _call(message: Message, mark: str) -> dict[str, Any]:
    """A call that the tool message answers."""
    function = {"name": message.get("name") or "unknown", "arguments": {"value": mark}}
    return {"id": message.get("tool_call_id") or "call_0", "type": "function", "function": function}

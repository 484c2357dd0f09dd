"""A conversation as token ids that only ever grow.

    prompt(messages, tools)          the model is asked                  [system, user, generation prompt]
      + sampled ids                  what it answers, untouched          [... <|im_end|>]
      + bridge(sampled, results)     what must follow, and nothing more  [tool results, generation prompt]
      + sampled ids ...

What was sampled is never decoded and tokenized again: that would give other tokens than those with the recorded log-probs. What
must follow a turn is cut out of the template's own rendering of a short stand-in conversation, behind the token that ends its
assistant turn; so no template has to be written anew for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import AssistantTurn, Message
from hone.agents.parsers.base import ToolParser
from hone.agents.rendering.comparison import Difference, compare, rewritten
from hone.agents.rendering.families import Family
from hone.agents.rendering.probes import probe_conversations
from hone.agents.rendering.template import HiddenText, Template
from hone.agents.rendering.text_tools import conversation_as_text, messages_as_text
from hone.errors import DataError

_STAND_IN = "hone stand-in"
_QUESTION: Message = {"role": "user", "content": "?"}


class Renderer:
    """Renders conversations for one tokenizer; :func:`~hone.agents.rendering.renderer_for` makes it.

    Args:
        template: the tokenizer's chat template.
        family: of the chat format.
        parser: reads the turns.
        tools_as_text: tools, calls and results are written into contents, because the template knows none.

    Attributes:
        stop_token_ids: tokens that end an assistant turn.
    """

    def __init__(self, template: Template, family: Family, parser: ToolParser, *, tools_as_text: bool = False) -> None:
        self.template, self.family, self.parser, self.tools_as_text = template, family, parser, tools_as_text
        known = template.tokenizer.added_tokens_encoder
        groups = family.closers or _closers_of(template)
        self._closers = [[token for token in group if token in known] for group in groups]
        self._closer_ids = [[known[token] for token in group] for group in self._closers]
        eos = template.tokenizer.eos_token_id
        stops = [known[token] for token in family.stops if token in known] if family.stops else self.closer_ids
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*stops, *([eos] if isinstance(eos, int) else [])]))
        self._checked_tools: set[tuple[str, ...]] = set()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer rendered for."""
        return self.template.tokenizer

    @property
    def closers(self) -> list[str]:
        """Tokens that the template ends an assistant turn with."""
        return [token for group in self._closers for token in group]

    @property
    def closer_ids(self) -> list[int]:
        """Their ids."""
        return [token for group in self._closer_ids for token in group]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a whole conversation.

        Raises:
            DataError: the template refuses the messages, or does not show the tools.
        """
        rendered = self.rendered(messages, tools, ask=generation_prompt)
        self._check_tools(tools, rendered.text)
        return self.template.encode(rendered)

    def bridge(
        self,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids to append behind what was sampled, for the model to be asked again.

        They are the end of the assistant turn where the model did not write it (a turn cut at its limit), the new messages, and
        the generation prompt.

        Args:
            sampled_ids: the last assistant turn as it was sampled.
            new_messages: one or more of role tool (with ``name`` and ``tool_call_id``), user or system.
            tools: function schemas.

        Raises:
            DataError: the template refuses the messages or leaves them out.
            ValueError: there are no new messages, or one is an assistant's.
        """
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            raise ValueError("a bridge needs new messages, and none of the assistant")
        new = messages_as_text(new_messages) if self.tools_as_text else list(new_messages)
        results = sum(message["role"] == "tool" for message in new)
        if results > 1 and self.family.results_one_by_one:
            return self._bridge_of(sampled_ids, _by_result(new), tools)
        try:
            return self._bridge_of(sampled_ids, [new], tools)
        except DataError:
            if results < 2:
                raise
            return self._bridge_of(sampled_ids, _by_result(new), tools)  # a template that takes one call at a time

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        calls_before: int = 0,
        prompt_ids: Sequence[int] | None = None,
    ) -> AssistantTurn:
        """Take a sampled turn apart.

        Args:
            sampled_ids: the turn.
            tools: function schemas.
            calls_before: number of calls earlier in the conversation, which makes the ids of calls unique in it.
            prompt_ids: what the turn was sampled behind, which may open a block of thoughts; None means a first turn's.
        """
        thinking = self.opens_thoughts if prompt_ids is None else self._ends_thinking(list(prompt_ids)[-8:])
        return self.parser.parse(sampled_ids, tools, calls_before=calls_before, thinking=thinking)

    def turn_ended(self, sampled_ids: Sequence[int]) -> bool:
        """Return whether a sampled turn came to its own end (and was not cut at a limit)."""
        ends = {*self.stop_token_ids, *self.closer_ids}
        return bool(sampled_ids) and sampled_ids[-1] in ends

    def split_reason(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        history_ids: Sequence[int],
    ) -> str | None:
        """Return why the new messages cannot be appended to what was played, or None when they can.

        They cannot when the template shows earlier turns otherwise once they follow (thoughts are taken out of them), so that a
        model that is used through the template would never see what it saw here. The rule then is: the training sample ends
        before the new messages, and another one begins whose prompt is ``prompt(messages + new_messages)``. A block of thoughts
        with nothing in it that comes or goes is no such reason.

        Args:
            messages: the conversation, the last assistant turn included.
            new_messages: what is to follow.
            tools: function schemas.
            history_ids: all token ids of the conversation so far.
        """
        if not self.rewrites:
            return None
        before = self.rendered(messages, tools, ask=False).text
        after = self.rendered([*messages, *new_messages], tools).text
        return rewritten(before, after, str(self.tokenizer.decode(list(history_ids))), self.closers)

    def sanity_check(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        mode: str = "strict",
    ) -> Difference | None:
        """Compare the tokens of a finished conversation with those that the template would give for its messages.

        A difference is no error: the tokens trained on are those sampled. It tells how far the model has gone from the
        template's way of writing.

        Args:
            ids: all token ids of the conversation.
            messages: the conversation.
            tools: function schemas.
            mode: ``strict``, ``ignore_strippable`` (white space does not count) or ``disable``.

        Returns:
            The first difference, or None.
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
        """Return the text of a conversation."""
        if self.tools_as_text:
            return self.template.text(conversation_as_text(messages, tools, system=self._takes_system_message), ask=ask)
        return self.template.text(messages, tools, ask=ask)

    @cached_property
    def rewrites(self) -> bool:
        """Whether the template ever shows a turn otherwise once more follows, found by trying."""
        for messages, new in probe_conversations():
            try:
                before, after = self.rendered(messages, ask=False).text, self.rendered([*messages, *new]).text
            except DataError:
                continue  # the template takes no such conversation
            if rewritten(before, after, None, self.closers) is not None:
                return True
        return False

    @cached_property
    def opens_thoughts(self) -> bool:
        """Whether the generation prompt ends within a block of thoughts."""
        return self._ends_thinking(self.template.encode(self.rendered([_QUESTION]))[-8:])

    @cached_property
    def _takes_system_message(self) -> bool:
        try:
            shown = self.template.text([{"role": "system", "content": _STAND_IN}, _QUESTION])
        except DataError:
            return False
        return _STAND_IN in shown.text

    def _ends_thinking(self, ids: list[int]) -> bool:
        opening, closing = self.parser.thoughts
        text = str(self.tokenizer.decode(ids))
        return opening in text and text.rfind(opening) > text.rfind(closing)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]] | None, shown: str) -> None:
        names = tuple(str(tool.get("function", tool).get("name")) for tool in tools or ())
        if names in self._checked_tools:
            return
        missing = [name for name in names if name not in shown]
        if missing:
            raise DataError(
                f"the chat template ignores tools: '{missing[0]}' does not occur in the rendered prompt",
                where=str(self.tokenizer.name_or_path),
                why="the model is not told of its tools, so it would never call them",
                fix="actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or a template that shows tools "
                "(actor_rollout_ref.model.custom_chat_template=PATH)",
                code="R35",
            )
        self._checked_tools.add(names)

    def _bridge_of(
        self, sampled_ids: Sequence[int], groups: list[list[Message]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        ids: list[int] = []
        for number, group in enumerate(groups):
            closer, tail = self._behind_a_turn(group, tools, ask=number == len(groups) - 1)
            encoded = self.template.encode(HiddenText(closer + tail.text, tail.hidden))
            ended = number > 0 or (bool(sampled_ids) and sampled_ids[-1] in self._same_as(closer))
            ids += encoded[1:] if closer and ended else encoded
        return ids

    def _same_as(self, closer: str) -> list[int]:
        for names, ids in zip(self._closers, self._closer_ids, strict=True):
            if closer in names:
                return ids
        return []

    def _behind_a_turn(
        self, new: list[Message], tools: Sequence[Mapping[str, Any]] | None, *, ask: bool
    ) -> tuple[str, HiddenText]:
        """The token that ends an assistant turn (\"\" where a template has none), and the rendering behind it."""
        mark = _STAND_IN
        while any(mark in str(message.get("content")) for message in new):
            mark += "."
        shown, start = self._stand_in(mark, new, tools, ask=ask)
        for message in new:
            self._check_shown(message, shown.text[start:])
        found = [(shown.text.find(closer, start), closer) for closer in self.closers]
        position, closer = min(((at, closer) for at, closer in found if at >= 0), default=(start, ""))
        return closer, shown[position + len(closer) :]

    def _stand_in(
        self, mark: str, new: list[Message], tools: Sequence[Mapping[str, Any]] | None, *, ask: bool
    ) -> tuple[HiddenText, int]:
        """A short conversation with the new messages behind an assistant turn, and where in it that turn's text ends."""
        calls = [_call(message, mark) for message in new if message["role"] == "tool"]
        turns: list[Message] = [{"role": "assistant", "content": mark}]
        if calls and self.closers:  # first with calls, as results of calls are shown
            turns.insert(0, {"role": "assistant", "content": "", "tool_calls": calls})
        refusal: DataError | None = None
        for turn in turns:
            try:
                shown = self.rendered_as_is([_QUESTION, turn, *new], tools, ask=ask)
            except DataError as error:
                refusal = refusal or error
                continue
            if mark in shown.text:
                return shown, shown.text.rindex(mark) + len(mark)
        raise refusal or DataError(
            "the chat template leaves the assistant's text out",
            where=str(self.tokenizer.name_or_path),
            why="what follows it cannot be found",
            fix="another template with actor_rollout_ref.model.custom_chat_template=PATH",
        )

    def rendered_as_is(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, ask: bool
    ) -> HiddenText:
        """Return the text of messages that were already put in the template's form."""
        return self.template.text(messages, None if self.tools_as_text else tools, ask=ask)

    def _check_shown(self, message: Message, tail: str) -> None:
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return
        word = max(content.split(), key=len)
        plain = "".join(character for character in word if character.isalnum() and character.isascii())
        if plain == word and word not in tail:
            raise DataError(
                f"the chat template leaves out a message of role '{message['role']}': '{word[:40]}' is not in its text",
                where=str(self.tokenizer.name_or_path),
                why="the model would be asked to go on without it",
                fix="actor_rollout_ref.rollout.multi_turn.renderer=text_tools, or another template with "
                "actor_rollout_ref.model.custom_chat_template=PATH",
                code="R35",
            )


def _call(message: Message, mark: str) -> dict[str, Any]:
    """A call that the tool message answers."""
    function = {"name": message.get("name") or "unknown", "arguments": {"value": mark}}
    return {"id": message.get("tool_call_id") or "call_0", "type": "function", "function": function}


def _by_result(messages: list[Message]) -> list[list[Message]]:
    """The messages in groups that begin with each result."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool" and groups[-1]:
            groups.append([])
        groups[-1].append(message)
    return groups


def _closers_of(template: Template) -> tuple[tuple[str, ...], ...]:
    """The special token that a template puts behind an assistant turn, none where it puts plain text there."""
    turns = [_QUESTION, {"role": "assistant", "content": _STAND_IN}, _QUESTION]
    text = template.text(turns).text
    _, found, behind = text.partition(_STAND_IN)
    literals = [str(template.tokenizer.convert_ids_to_tokens(index)) for index in template.special]
    following = [(behind.find(literal), literal) for literal in literals if literal in behind]
    return ((min(following)[1],),) if found and following else ()

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
from hone.agents.parsers.base import ToolParser, named_tokens
from hone.agents.rendering.comparison import Difference, compare, rewritten
from hone.agents.rendering.continuation import Continuation, by_result, closers_of
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
        closers: tokens that the template ends an assistant turn with.
        closer_ids: their ids.
        stop_token_ids: tokens at which generation ends.
    """

    def __init__(self, template: Template, family: Family, parser: ToolParser, *, tools_as_text: bool = False) -> None:
        self.template, self.family, self.parser, self.tools_as_text = template, family, parser, tools_as_text
        groups = family.closers or closers_of(template)
        known = named_tokens(template.tokenizer)
        named = [[token for token in group if token in known] for group in groups]
        self._continuation = Continuation(template, [group for group in named if group], shows_tools=not tools_as_text)
        self.closers: list[str] = [token for group in named for token in group]
        self.closer_ids: list[int] = [known[token] for token in self.closers]
        eos = template.tokenizer.eos_token_id
        stops = [known[token] for token in family.stops if token in known] if family.stops else self.closer_ids
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*stops, *([eos] if isinstance(eos, int) else [])]))
        self._checked_tools: set[tuple[str, ...]] = set()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer rendered for."""
        return self.template.tokenizer

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
            return self._continuation.ids(sampled_ids, by_result(new), tools)
        try:
            return self._continuation.ids(sampled_ids, [new], tools)
        except DataError:
            if results < 2:
                raise
            return self._continuation.ids(
                sampled_ids, by_result(new), tools
            )  # a template that takes one call at a time

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

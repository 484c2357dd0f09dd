"""Base of conversational loops: parse policy turns into messages, append messages as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.context import EpisodeContext
from hone.agents.episode import Episode
from hone.agents.messages import AssistantTurn, Message, check_read
from hone.config.agents import CompactionConfig, MultiTurnConfig
from hone.data.episode_log import EpisodeEnd
from hone.data.types import StopReason
from hone.text import valid_data

REMOVED = "(result removed)"
"""Content of a tool result that was dropped."""
SUMMARY = "What happened so far:"
"""Line before a summary."""


class Compactor:
    """Decides when a conversation is rewritten, and how."""

    def __init__(self, multi_turn: MultiTurnConfig) -> None:
        self.config: CompactionConfig = multi_turn.compaction
        self.reserve = compaction_reserve(multi_turn)

    @property
    def asks(self) -> bool:
        return self.config.strategy == "summarize"

    @property
    def instruction(self) -> Message:
        """Message that asks for a summary."""
        return {"role": "user", "content": self.config.instruction}

    def is_due(self, tokens: int, turn: int) -> bool:
        """Return whether a conversation of ``tokens`` is rewritten before a next turn of at most ``turn`` tokens."""
        limit = self.config.context_tokens
        return self.config.strategy is not None and limit is not None and tokens + turn + self.reserve > limit

    def without_results(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation without the contents of its tool results, except those of the latest ``keep_turns`` turns."""
        kept = len(messages) - len(latest_turns(messages, max(1, self.config.keep_turns)))
        return [
            {**message, "content": REMOVED} if message["role"] == "tool" and place < kept else message
            for place, message in enumerate(messages)
        ]

    def summarized(self, prompt: Sequence[Message], messages: Sequence[Message], summary: str) -> list[Message]:
        """Return the conversation that follows a summary.

        Args:
            prompt: messages of the episode's prompt; the summary is added to the last one of the user.
            messages: the conversation before the request for a summary.
            summary: text of the policy.
        """
        last = max((place for place, message in enumerate(prompt) if message["role"] == "user"), default=None)
        note = f"{SUMMARY}\n{summary}"
        if last is None:
            begin = [*prompt, {"role": "user", "content": note}]
        else:
            request: dict[str, Any] = {**prompt[last], "content": f"{prompt[last]['content']}\n\n{note}"}
            begin = [*prompt[:last], request, *prompt[last + 1 :]]
        return [*begin, *latest_turns(messages, self.config.keep_turns)]


def latest_turns(messages: Sequence[Message], count: int) -> list[Message]:
    """Return the last ``count`` turns of the policy, each with the messages that follow it."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[turns[-min(count, len(turns))] :]) if count and turns else []


_WRAPPER_TOKENS, _REQUEST_TOKENS = 32, 64
"""Upper bounds of the usual templates: tokens around a tool result, and those of the request for a summary."""


def compaction_reserve(multi_turn: MultiTurnConfig) -> int:
    """Return the tokens that stay free after a turn: for the results of its calls, and for a summary with its request."""
    config = multi_turn.compaction
    if config.reserve_tokens is not None:
        return config.reserve_tokens
    results = multi_turn.max_parallel_calls * (multi_turn.max_tool_response_length + _WRAPPER_TOKENS)
    return results + (config.max_summary_tokens + _REQUEST_TOKENS if config.strategy == "summarize" else 0)


Tools = Sequence[dict[str, Any]]


class ChatLoop(AgentLoop):
    """Base class of loops whose episodes are conversations."""

    needs_messages = True

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self.renderer = context.renderer
        self.compactor = Compactor(context.multi_turn)

    async def take_turn(self, episode: Episode, tools: Tools = ()) -> AssistantTurn:
        """Generate a policy turn and parse it, after a summary if one was asked for.

        Raises:
            BudgetSpent: a limit is reached. A turn that was truncated by the token limit is still added to the conversation.
        """
        if episode.messages[-1:] == [self.compactor.instruction]:
            await self._summarize(episode, tools)
        return await self._turn(episode, tools)

    async def _summarize(self, episode: Episode, tools: Tools) -> None:
        """Let the policy write a summary, which replaces the conversation."""
        before = episode.messages[:-1]
        turn = await self._turn(episode, tools, max_tokens=self.compactor.config.max_summary_tokens)
        self._rewrite(episode, self.compactor.summarized(episode.sample.messages or [], before, turn.content), tools)

    def _rewrite(self, episode: Episode, messages: list[Message], tools: Tools) -> None:
        prompt_ids = episode.shown.expand(self.renderer.prompt(messages, list(tools) or None), messages)
        limit = self.compactor.config.context_tokens
        if limit is not None and len(prompt_ids) >= limit:
            raise BudgetSpent(EpisodeEnd.CONTEXT)
        episode.rewrite(messages, prompt_ids)

    async def _turn(self, episode: Episode, tools: Tools, max_tokens: int | None = None) -> AssistantTurn:
        stops = dict.fromkeys((*episode.sampling.stop_token_ids, *self.renderer.stop_token_ids))
        before = episode.ledger.ids
        completion = await episode.generate(max_tokens=max_tokens, stop_token_ids=tuple(stops))
        calls = sum(len(message.get("tool_calls", ())) for message in episode.log.messages)
        turn = self.renderer.parse(completion.token_ids, list(tools) or None, calls_before=calls, prompt_ids=before)
        episode.log.messages.append(turn.message())
        if completion.stop_reason is StopReason.LENGTH and episode.tokens_left <= 0:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        return turn

    def answer(self, episode: Episode, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Append messages to the policy's turn, so that the policy can answer them; rewrite a conversation that grows too long.

        If the chat template would rewrite earlier turns (remove their thinking), a new segment of the episode begins with
        the conversation as the template renders it. Otherwise tokens are only appended.

        Raises:
            BudgetSpent: the messages do not fit.
            DataError: the messages contain something other than text, and images if the model reads them.
        """
        messages = valid_data(list(messages))
        who = f"the answer to turn {episode.log.assistant_turns} of row {episode.sample.uid}"
        check_read(messages, who, images=episode.shown.processor is not None)
        messages, images = episode.shown.placed(messages, who)
        schemas, ledger = list(tools) or None, episode.ledger
        before, last = episode.messages, ledger.turns[-1]
        sampled = ledger.response_ids[last.start : last.stop]
        if self.compactor.config.strategy is not None:
            given = episode.shown.expand(self.renderer.bridge(sampled, messages, schemas), messages, images)
            following = len(ledger) + len(given)
            if self.compactor.is_due(following, episode.sampling.max_tokens):
                if not self.compactor.asks:
                    episode.log.messages += messages
                    episode.shown.add(images)
                    self._rewrite(episode, self.compactor.without_results(episode.messages), tools)
                    return
                messages = [*messages, self.compactor.instruction]
        episode.log.messages += messages
        history = episode.shown.fold(ledger.ids)
        episode.shown.add(images)
        if self.renderer.split_reason(before, list(messages), schemas, history_ids=history):
            episode.begin(episode.shown.expand(self.renderer.prompt(episode.messages, schemas), episode.messages))
            return
        episode.append(episode.shown.expand(self.renderer.bridge(sampled, list(messages), schemas), messages))

    def check_tokens(self, episode: Episode, tools: Tools = ()) -> None:
        """Compare the last segment's tokens with a fresh rendering of its conversation, and log a difference."""
        mode = self.context.multi_turn.tokenization_sanity_check_mode
        if mode == "disable" or not episode.ledger.turns:
            return
        ids = episode.shown.fold(episode.ledger.ids)
        difference = self.renderer.sanity_check(ids, episode.messages, list(tools) or None, mode=mode)
        if difference is not None:
            episode.log.tokenization = difference.kind

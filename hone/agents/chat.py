"""Base of conversational loops: parse policy turns into messages, append messages as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.compaction import Compactor
from hone.agents.context import EpisodeContext
from hone.agents.episode import Episode
from hone.agents.messages import AssistantTurn, Message, check_read
from hone.data.episode_log import EpisodeEnd
from hone.data.types import StopReason
from hone.text import valid_data

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

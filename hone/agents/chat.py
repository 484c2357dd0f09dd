"""Conversations: turns of the policy read as messages, and messages put behind its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.episode import Episode
from hone.agents.messages import AssistantTurn, Message, check_text
from hone.agents.setting import Setting
from hone.data.episode_log import EpisodeEnd
from hone.data.types import StopReason

Tools = Sequence[dict[str, Any]]


class ChatLoop(AgentLoop):
    """What loops that hold a conversation share."""

    needs_messages = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.renderer = setting.renderer

    async def take_turn(self, episode: Episode, tools: Tools = ()) -> AssistantTurn:
        """Let the policy take a turn, and read it.

        Raises:
            BudgetSpent: a limit is reached. A turn that was cut by the episode's last token is in the conversation.
        """
        stops = dict.fromkeys((*episode.sampling.stop_token_ids, *self.renderer.stop_token_ids))
        before = episode.ledger.ids
        completion = await episode.generate(stop_token_ids=tuple(stops))
        calls = sum(len(message.get("tool_calls", ())) for message in episode.log.messages)
        turn = self.renderer.parse(completion.token_ids, list(tools) or None, calls_before=calls, prompt_ids=before)
        episode.log.messages.append(turn.message())
        if completion.stop_reason is StopReason.LENGTH and episode.tokens_left <= 0:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        return turn

    def answer(self, episode: Episode, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Put messages behind the policy's turn and ask it again.

        Where the chat template would rewrite earlier turns (remove their thinking), a new part of the episode begins with
        the conversation as the template has it; otherwise tokens are only appended.

        Raises:
            BudgetSpent: they do not fit.
            DataError: they hold something else than text.
        """
        check_text(messages, f"what answered turn {episode.log.assistant_turns} of row {episode.sample.uid}")
        schemas, ledger = list(tools) or None, episode.ledger
        before = episode.messages
        episode.log.messages += messages
        if self.renderer.split_reason(before, list(messages), schemas, history_ids=ledger.ids):
            episode.begin(self.renderer.prompt(episode.messages, schemas))
            return
        last = ledger.turns[-1]
        episode.append(self.renderer.bridge(ledger.response_ids[last.start : last.stop], list(messages), schemas))

    def check_tokens(self, episode: Episode, tools: Tools = ()) -> None:
        """Compare the tokens of the last part with its conversation rendered anew, and note what differs."""
        mode = self.setting.multi_turn.tokenization_sanity_check_mode
        if mode == "disable" or not episode.ledger.turns:
            return
        difference = self.renderer.sanity_check(episode.ledger.ids, episode.messages, list(tools) or None, mode=mode)
        if difference is not None:
            episode.log.tokenization = difference.kind

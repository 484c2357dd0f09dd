"""Tool agent: the policy calls tools until it answers without a call, or a limit ends the episode."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.episode import Episode
from hone.agents.messages import AssistantTurn, Message
from hone.agents.tools.delegate import NAME, Delegate
from hone.agents.tools.toolbox import ToolSession
from hone.data.episode_log import EpisodeEnd


@AGENT_LOOPS.register("tool_agent")
class ToolAgent(ChatLoop):
    """Loop of turn, calls, results, turn, ... until a turn has no calls.

    The calls of a turn run concurrently, up to ``multi_turn.max_parallel_calls``. Every call, also a malformed one or one over the
    limit, is answered by a tool message. With ``multi_turn.subagents`` the policy can give tasks to sub-agents. ``extra_info.tool_selection`` of a row lists the allowed tools, and
    ``extra_info.tools_kwargs`` their arguments.
    """

    async def play(self, episode: Episode) -> None:
        """Play the episode until a turn has no calls."""
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            if self.context.multi_turn.subagents:
                tools.add(Delegate(lambda task: self._delegated(episode, tools, task)))
            await self._converse(episode, tools)
            episode.log.end = EpisodeEnd.ANSWER
            self.check_tokens(episode, tools.schemas)

    async def _converse(self, episode: Episode, tools: ToolSession) -> AssistantTurn:
        """Play a conversation until a turn has no calls, and return that turn."""
        while True:
            turn = await self.take_turn(episode, tools.schemas)
            if not turn.calls:
                return turn
            if tools.exhausted:
                raise BudgetSpent(EpisodeEnd.TOOL_CALLS)
            try:
                results = await tools.answer(turn.calls)
            finally:
                await episode.absorb_children()
            self.answer(episode, results, tools.schemas)

    async def _delegated(self, episode: Episode, tools: ToolSession, task: str) -> str:
        """Play a task in a conversation of its own; return the answer, or the limit that ended it."""
        messages: list[Message] = [{"role": "user", "content": task}]
        schemas = [schema for schema in tools.schemas if schema["function"]["name"] != NAME]
        child = episode.child(messages, self.renderer.prompt(messages, schemas or None))
        try:
            turn = await self._converse(child, tools.shared_with(child, schemas))
        except BudgetSpent as limit:
            return f"error: the assistant has no answer, it reached the limit '{limit.end}'"
        return turn.content

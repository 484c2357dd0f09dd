"""Tool agent: the policy calls tools until it answers without a call, or a limit ends the episode."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.episode import Episode
from hone.data.episode_log import EpisodeEnd


@AGENT_LOOPS.register("tool_agent")
class ToolAgent(ChatLoop):
    """Loop of turn, calls, results, turn, ... until a turn has no calls.

    The calls of a turn run concurrently, up to ``multi_turn.max_parallel_calls``. Every call, also a malformed one or one over the
    limit, is answered by a tool message. ``extra_info.tool_selection`` of a row lists the allowed tools, and
    ``extra_info.tools_kwargs`` their arguments.
    """

    async def play(self, episode: Episode) -> None:
        """Play the episode until a turn has no calls."""
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            while True:
                turn = await self.take_turn(episode, tools.schemas)
                if not turn.calls:
                    break
                if tools.exhausted:
                    raise BudgetSpent(EpisodeEnd.TOOL_CALLS)
                results = await tools.answer(turn.calls)
                self.answer(episode, results, tools.schemas)
            episode.log.end = EpisodeEnd.ANSWER
            self.check_tokens(episode, tools.schemas)

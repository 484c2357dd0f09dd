"""The tool agent: the policy calls tools until it answers without a call, or a limit ends the episode."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.episode import Episode
from hone.data.episode_log import EpisodeEnd


@AGENT_LOOPS.register("tool_agent")
class ToolAgent(ChatLoop):
    """Turn, calls, results, turn, ... until a turn calls nothing.

    The calls of a turn run at the same time, ``multi_turn.max_parallel_calls`` of them; every call, also one that cannot be
    read or is over the limit, is answered by a tool message. ``extra_info.tool_selection`` of a row names the tools it may
    use, ``extra_info.tools_kwargs`` their arguments.
    """

    async def play(self, episode: Episode) -> None:
        """Play to the end."""
        async with self.setting.toolbox.session(episode, self.setting) as tools:
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

"""Agent loop with one prompt and one response."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS, AgentLoop
from hone.agents.episode import Episode


@AGENT_LOOPS.register("single_turn", "single_turn_agent")
class SingleTurn(AgentLoop):
    several_turns = False

    async def play(self, episode: Episode) -> None:
        await episode.generate()

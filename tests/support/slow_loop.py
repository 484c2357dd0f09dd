"""Agent loop with two turns and a tool of 20 to 300 ms between them, drawn from the episode's seed."""

import asyncio
import random

from hone.agents.base import AgentLoop
from hone.agents.episode import Episode


class SlowTool(AgentLoop):
    """A turn, a wait, a result of one token, a turn."""

    async def play(self, episode: Episode) -> None:
        draw = random.Random(episode.seed)
        await episode.generate(max_tokens=3)
        await episode.outside(asyncio.sleep(0.02 + 0.28 * draw.random() ** 4))
        episode.append([5])
        await episode.generate(max_tokens=3)

"""Agent loop of `async.py`: turns with a long-tailed number of tokens, and tools of 0.2 to 2 s between them, drawn from the episode's seed."""

from __future__ import annotations

import asyncio
import random

from hone.agents.base import AgentLoop
from hone.agents.episode import Episode

RESULT = 8
"""Tokens of a tool's result."""


class SlowTools(AgentLoop):
    """Turns whose lengths and tools depend only on the episode's seed, so that they are the same in every mode.

    The reward is the share of even tokens, so that groups differ in it.
    """

    gives_reward = True

    async def play(self, episode: Episode) -> None:
        """Play all turns."""
        draw = random.Random(episode.seed)
        turns = draw.choice((1, 2, 2, 3))
        for turn in range(turns):
            await episode.generate(max_tokens=min(96, max(8, int(draw.lognormvariate(3.0, 0.7)))), ignore_eos=True)
            if turn < turns - 1:
                await episode.outside(asyncio.sleep(min(2.0, max(0.2, draw.lognormvariate(-0.5, 0.7)))))
                episode.append([turn + 1] * RESULT)
        ids = episode.ledger.response_ids
        episode.log.reward = sum(token % 2 == 0 for token in ids) / len(ids)

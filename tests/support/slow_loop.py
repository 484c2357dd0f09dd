"""Agent loop with two turns and a tool of 20 to 300 ms between them, drawn from the episode's seed."""

import asyncio
import random

from hone.agents.base import AgentLoop
from hone.agents.episode import Episode

PROMPTS = 4
"""Of a step."""
MULTI_TURN = (
    "actor_rollout_ref.rollout.multi_turn={enable: true, max_assistant_turns: 2}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=support.slow_loop:SlowTool",
)
ASYNCHRONOUS = (
    *("trainer.async.max_staleness=2", "trainer.async.partial_rollouts=true", "trainer.save_freq=1", *MULTI_TURN),
    *("actor_rollout_ref.rollout.num_replicas=2", f"data.train_batch_size={PROMPTS}"),
    *("algorithm.filter_groups.enable=false", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}"),
    *("actor_rollout_ref.rollout.server_pool={max_attempts: 1000, start_attempts: 1000, health_check_period: 0.5}",),
    "preflight.reward_rows=0",
)
"""An asynchronous run of two engines whose episodes wait for a tool."""


class SlowTool(AgentLoop):
    """A turn, a wait, a result of one token, a turn."""

    async def play(self, episode: Episode) -> None:
        draw = random.Random(episode.seed)
        await episode.generate(max_tokens=3)
        await episode.outside(asyncio.sleep(0.02 + 0.28 * draw.random() ** 4))
        episode.append([5])
        await episode.generate(max_tokens=3)


class QuickTool(AgentLoop):
    """The same without the wait: which episodes are computed together, and so the last digits, do not depend on time."""

    async def play(self, episode: Episode) -> None:
        await episode.generate(max_tokens=3)
        episode.append([5])
        await episode.generate(max_tokens=3)

"""Episodes to simulate: lengths of turns, and seconds of tools and scores, drawn for each episode from its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from hone.agents.base import AgentLoop, EpisodeContext
from hone.agents.episode import Episode


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, then a tool.

    Attributes:
        tokens: sampled tokens.
        tool_seconds: seconds of the tool that answers it.
        tool_tokens: tokens of the tool's answer.
    """

    tokens: int
    tool_seconds: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """Plan of one episode.

    Attributes:
        turns: turns in order.
        fails: raise an error after the last turn.
    """

    turns: tuple[Turn, ...]
    fails: bool = False


@dataclass(frozen=True)
class Workload:
    """Distribution of episodes; every function draws from a generator of its own, so the results do not depend on the schedule.

    Attributes:
        plan: draws an episode.
        score_seconds: draws the seconds until a group is scored.
        useful: draws if the answers of a group differ, for dynamic sampling.
        prompt_tokens: tokens of each prompt.
    """

    plan: Callable[[random.Random], Plan]
    score_seconds: Callable[[random.Random], float] = lambda _: 0.0
    useful: Callable[[random.Random], bool] = lambda _: True
    prompt_tokens: int = 1


@dataclass
class SimulatedContext(EpisodeContext):
    """Context of episodes that play a workload."""

    workload: Workload | None = None


class PlannedLoop(AgentLoop):
    """Agent loop that plays the plan which the workload draws from the episode's seed."""

    context: SimulatedContext

    async def play(self, episode: Episode) -> None:
        """Play the turns; a tool takes virtual time."""
        assert self.context.workload is not None
        plan = self.context.workload.plan(random.Random(episode.seed))
        for turn in plan.turns:
            await episode.generate(max_tokens=turn.tokens)
            if turn.tool_seconds:
                await episode.outside(asyncio.sleep(turn.tool_seconds))
            if turn.tool_tokens and turn is not plan.turns[-1]:
                episode.append([0] * turn.tool_tokens)
        if plan.fails:
            raise RuntimeError("this episode fails by its plan")

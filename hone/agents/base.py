"""Base class of agent loops, which play episodes from the prompt to the end.

>>> class TwoTries(AgentLoop):
...     \"\"\"Asks once more when the first answer is short.\"\"\"
...
...     async def play(self, episode):
...         first = await episode.generate()
...         if len(first.token_ids) < 5:
...             episode.append(self.context.tokenizer.encode(" Think again:"))
...             await episode.generate()

The loop is chosen by ``agent_name`` of a dataset row or ``actor_rollout_ref.rollout.agent.default_agent_loop``: a registered name,
or an import path such as ``my_loops:TwoTries``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from hone.agents.context import EpisodeContext
from hone.agents.episode import Episode
from hone.registry import Registry


class AgentLoop(ABC):
    """Base class of agent loops. One object plays all episodes of a run concurrently; per-episode state is in the episode.

    Args:
        context: context that all episodes share.
    """

    several_turns = True
    """True if episodes can have several turns, so that the engine keeps a session KV cache between turns."""
    gives_reward = False
    """True if the loop's episodes compute their reward, so that no scorer is needed."""
    needs_messages = False
    """True if the prompt must be chat messages, because text or token ids cannot be continued as a conversation."""

    def __init__(self, context: EpisodeContext) -> None:
        self.context = context

    @abstractmethod
    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        A limit raises :class:`~hone.agents.episode.BudgetSpent`, which must propagate. Any other exception except HoneError
        means that the episode failed: it is retried or dropped according to ``agent.on_error``.
        """


def _adopt(loop: Any, path: str) -> type[AgentLoop]:
    if not (inspect.isclass(loop) and issubclass(loop, AgentLoop)):
        raise TypeError("it should be a class derived from hone.agents.base.AgentLoop")
    if inspect.isabstract(loop):
        raise TypeError("it has no method `async def play(self, episode)`")
    return loop


AGENT_LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop", key="actor_rollout_ref.rollout.agent.default_agent_loop", adopt=_adopt
)
"""Agent loops by name."""

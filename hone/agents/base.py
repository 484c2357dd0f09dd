"""What an agent loop is: the rule by which an episode is played, from its prompt to its end.

>>> class TwoTries(AgentLoop):
...     \"\"\"Asks once more when the first answer is short.\"\"\"
...
...     async def play(self, episode):
...         first = await episode.generate()
...         if len(first.token_ids) < 5:
...             episode.append(self.setting.tokenizer.encode(" Think again:"))
...             await episode.generate()

``agent_name`` of a dataset row, or ``actor_rollout_ref.rollout.agent.default_agent_loop``, names it: a registered name, or an
import path such as ``my_loops:TwoTries``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from hone.agents.episode import Episode
from hone.agents.setting import Setting
from hone.registry import Registry


class AgentLoop(ABC):
    """Plays episodes. One object plays all episodes of a run, many at a time: what belongs to one episode lives in it.

    Args:
        setting: what the episodes share.
    """

    several_turns = True
    """Whether episodes have more than one turn, so that the engine keeps what it has computed for the next."""
    gives_reward = False
    """Whether its episodes bring rewards of their own, so that no scorer is needed."""
    needs_messages = False
    """Whether the prompt must be chat messages: text or token ids cannot be continued as a conversation."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        Limits end it by themselves: :class:`~hone.agents.budget.BudgetSpent` passes through. Any other exception, a
        HoneError excepted, is an episode that broke: it is retried or dropped, as ``agent.on_error`` says.
        """


def _adopt(found: Any, path: str) -> type[AgentLoop]:
    if not (inspect.isclass(found) and issubclass(found, AgentLoop)):
        raise TypeError("it should be a class derived from hone.agents.base.AgentLoop")
    if inspect.isabstract(found):
        raise TypeError("it has no method `async def play(self, episode)`")
    return found


AGENT_LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop", key="actor_rollout_ref.rollout.agent.default_agent_loop", adopt=_adopt
)
"""Agent loops by name."""

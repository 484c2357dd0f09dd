"""Lookup of the agent loop of a row, once per name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.config.tree import RLConfig
from hone.data.files import Row
from hone.errors import HoneError

if TYPE_CHECKING:
    from hone.agents.base import AgentLoop


class Loops:
    """Agent loops of an RL run.

    Args:
        config: configuration of the run, with the default loop of rows that name none.
    """

    def __init__(self, config: RLConfig) -> None:
        from hone.agents.catalogue import default_loop

        rollout = config.actor_rollout_ref.rollout
        self._default = default_loop(rollout.multi_turn, rollout.agent)
        self._classes: dict[str, type[AgentLoop] | None] = {}

    def name(self, row: Row) -> str:
        """Return the name of the loop that plays a row."""
        return str(row.values.get("agent_name") or self._default)

    def loop_class(self, row: Row) -> type[AgentLoop] | None:
        """Return the class of the loop that plays a row; None for an unknown name, which R48 reports."""
        name = self.name(row)
        if name not in self._classes:
            self._classes[name] = self._class(name)
        return self._classes[name]

    def _class(self, name: str) -> type[AgentLoop] | None:
        from hone.agents.catalogue import AGENT_LOOPS

        try:
            return AGENT_LOOPS.get(name)
        except HoneError:
            return None

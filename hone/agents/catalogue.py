"""All agent loops, and the default for rows without ``agent_name``."""

from __future__ import annotations

from hone.agents import environment_loop, interaction_loop, single_turn, tool_agent
from hone.agents.base import AGENT_LOOPS
from hone.config.agents import AgentConfig, MultiTurnConfig

__all__ = [
    "AGENT_LOOPS",
    "default_loop",
    "environment_loop",
    "interaction_loop",
    "single_turn",
    "tool_agent",
]

# they play through an HTTP endpoint, which no other loop needs
AGENT_LOOPS.register_later("hone.agents.program.loop", "program")
AGENT_LOOPS.register_later("hone.agents.program.verifiers_loop", "verifiers")


def default_loop(multi_turn: MultiTurnConfig, agent: AgentConfig) -> str:
    """Return the loop for rows without ``agent_name``: the configured default, else the one that the given files imply."""
    if agent.default_agent_loop is not None:
        return agent.default_agent_loop
    if agent.program.command or agent.program.function:
        return "program"
    if multi_turn.enable and multi_turn.interaction_config_path:
        return "interaction"
    if multi_turn.enable and (multi_turn.tool_config_path or multi_turn.function_tool_path):
        return "tool_agent"
    return "single_turn"

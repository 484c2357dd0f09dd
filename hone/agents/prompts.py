"""Tool schemas in the prompts of dataset rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.catalogue import AGENT_LOOPS, default_loop
from hone.agents.context import EpisodeContext
from hone.agents.environment_loop import EnvironmentLoop
from hone.agents.environments.base import make_environment
from hone.agents.messages import check_read
from hone.agents.tool_agent import ToolAgent
from hone.agents.tools.delegate import SCHEMA as DELEGATE
from hone.data.prompts import ToolsOf
from hone.data.types import Sample
from hone.errors import DataError


def loop_class(context: EpisodeContext, sample: Sample) -> type[AgentLoop]:
    return AGENT_LOOPS.get(sample.agent_name or default_loop(context.multi_turn, context.agent))


def tools_of(context: EpisodeContext) -> ToolsOf:
    """Return a function that gives the tool schemas for the prompt of a row.

    The function raises DataError if a row lacks the messages that its loop needs, or selects an unknown tool.
    """

    def tools(sample: Sample) -> Sequence[dict[str, Any]]:
        loop = loop_class(context, sample)
        if not loop.needs_messages:
            return ()
        if sample.messages is None:
            raise flat_prompt_error(sample)
        check_read(sample.messages, f"the prompt of row {sample.uid}", images=bool(sample.images))
        if issubclass(loop, EnvironmentLoop):
            spec = sample.extra_info.get("environment") or {}
            return make_environment(spec["name"], spec.get("options") or {}).tools if "name" in spec else ()
        schemas = context.toolbox.schemas(sample.extra_info.get("tool_selection"))
        delegates = context.multi_turn.subagents and issubclass(loop, ToolAgent)
        return [*schemas, DELEGATE] if delegates else schemas

    return tools


def flat_prompt_error(sample: Sample) -> DataError:
    """Return the error for a prompt that cannot be continued as a conversation."""
    return DataError(
        f"row {sample.uid} has a prompt of plain text or token ids, but its loop plays a conversation",
        why="a conversation is continued by the chat template, which needs messages",
        fix='write the prompt as [{"role": "user", "content": "..."}], or set agent_name=single_turn for this row',
        where="data.prompt_key",
        code="R34",
    )

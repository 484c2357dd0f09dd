"""What a dataset row's prompt shows of the tools that its loop offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.catalogue import AGENT_LOOPS, default_loop
from hone.agents.environment_loop import EnvironmentLoop
from hone.agents.environments.base import make_environment
from hone.agents.messages import check_text
from hone.agents.setting import Setting
from hone.data.prompts import ToolsOf
from hone.data.types import Sample
from hone.errors import DataError


def loop_class(setting: Setting, sample: Sample) -> type[AgentLoop]:
    """The loop that plays a row.

    Raises:
        ConfigError: there is none of that name.
    """
    return AGENT_LOOPS.get(sample.agent_name or default_loop(setting.multi_turn, setting.agent))


def tools_of(setting: Setting) -> ToolsOf:
    """The function schemas that the prompt of a row shows: those its loop offers.

    What it returns raises DataError for a row whose loop needs messages and that has none, or that selects an unknown tool.
    """

    def tools(sample: Sample) -> Sequence[dict[str, Any]]:
        loop = loop_class(setting, sample)
        if not loop.needs_messages:
            return ()
        if sample.messages is None:
            raise flat_prompt(sample)
        check_text(sample.messages, f"the prompt of row {sample.uid}")
        if issubclass(loop, EnvironmentLoop):
            spec = sample.extra_info.get("environment") or {}
            return make_environment(spec["name"], spec.get("options") or {}).tools if "name" in spec else ()
        return setting.toolbox.schemas(sample.extra_info.get("tool_selection"))

    return tools


def flat_prompt(sample: Sample) -> DataError:
    """The error for a prompt that cannot be continued as a conversation."""
    return DataError(
        f"row {sample.uid} has a prompt of plain text or token ids, and its episode has several turns",
        why="a conversation is continued by the chat template, which needs messages",
        fix='write the prompt as [{"role": "user", "content": "..."}], or agent_name=single_turn for this row',
        where="data.prompt_key",
        code="R34",
    )

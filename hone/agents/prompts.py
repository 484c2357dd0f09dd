"""Tool schemas in the prompts of dataset rows, and the contract of a policy that was trained as an agent.

Agent contract: what a policy that was trained as an agent expects of the program that runs it.

Three parts: how a conversation becomes tokens, which tools exist, and what a call gives. Each has a hash, so that a run, a checkpoint and an
evaluation can be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hone.agents.base import AgentLoop
from hone.agents.context import EpisodeContext
from hone.agents.environments.base import make_environment
from hone.agents.messages import check_read
from hone.agents.tool_agent import AGENT_LOOPS, EnvironmentLoop, ToolAgent, default_loop
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


VERSION = 1
"""Version of the semantics that no setting changes: statuses of calls, and the texts that the model reads for them."""
_RESULTS = (
    "max_parallel_calls",
    "max_tool_response_length",
    "tool_response_truncate_side",
    "tool_timeout",
    "tool_retries",
    "compaction",
)
_NAMES = {
    "chat_format": "the chat format",
    "tools": "the tools",
    "results": "what a call gives",
    "version": "the version",
}


def agent_contract(context: EpisodeContext) -> dict[str, str]:
    """Return version and hashes of the contract; empty if episodes have one turn."""
    if not context.multi_turn.enable:
        return {}
    renderer, settings = context.renderer, vars(context.multi_turn)
    chat = {
        "template": getattr(context.tokenizer, "chat_template", None),
        "arguments": context.template_kwargs,
        "parser": type(renderer.parser).__name__,
        "tools_as_text": renderer.tools_as_text,
        "stops": list(renderer.stop_token_ids),
    }
    added = [DELEGATE] if context.multi_turn.subagents else []
    schemas = sorted([*context.toolbox.schemas(), *added], key=lambda schema: str(schema["function"]["name"]))
    return {
        "version": str(VERSION),
        "chat_format": _hash(chat),
        "tools": _hash(schemas),
        "results": _hash({name: settings[name] for name in _RESULTS}),
    }


def contract_changes(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return in words what differs between two contracts; nothing if one is empty, as for single turns."""
    if not earlier or not now:
        return []
    return [_NAMES.get(name, name) for name in _NAMES if earlier.get(name) != now.get(name)]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

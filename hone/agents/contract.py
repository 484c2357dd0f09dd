"""Agent contract: what a policy that was trained as an agent expects of the program that runs it.

Three parts: how a conversation becomes tokens, which tools exist, and what a call gives. Each has a hash, so that a run, a checkpoint and an
evaluation can be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hone.agents.base import EpisodeContext
from hone.agents.tools.delegate import SCHEMA as DELEGATE

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

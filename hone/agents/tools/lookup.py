"""Tool that looks up facts of a row's table, one key per call, so that answers need several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.agents.tools.base import Tool, ToolError, text_schema

_SCHEMA = text_schema("lookup", "Look up one fact.", "key", "what to look up")


class Lookup(Tool):
    """Tool that answers from ``extra_info.tools_kwargs.lookup.create_kwargs.facts`` of the row, a mapping or a list of [key, value]."""

    def __init__(self) -> None:
        super().__init__(_SCHEMA)

    async def create(self, *, facts: Any = (), **kwargs: Any) -> dict[str, str]:
        return {str(key): str(value) for key, value in (facts.items() if isinstance(facts, Mapping) else facts)}

    async def execute(self, state: dict[str, str], arguments: Mapping[str, Any], **kwargs: Any) -> str:
        key = arguments["key"].strip()
        if key not in state:
            raise ToolError(f"nothing is known of '{key}'")
        return state[key]

"""Forced tool calls (``tool_choice``): the reply is prefilled with the beginning of a call."""

from __future__ import annotations

import json
from typing import Any

from hone.agents.parsers.hermes import HermesParser
from hone.agents.rendering import Renderer
from hone.agents.serving.errors import bad_request
from hone.agents.serving.wire import ChatBody, NamedTool


def forced_ids(renderer: Renderer, body: ChatBody) -> list[int]:
    """Return tokens that force the reply to be a call, appended to the prompt; empty if the model may choose.

    They are not sampled: they have no log-probs and are excluded from the loss mask.

    Raises:
        ApiError: the tool is unknown, or the model's call format cannot be prefilled.
    """
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return []
    names = [_name(tool) for tool in body.tools]
    if not names:
        raise bad_request("tool_choice requires a call, but 'tools' is empty", "tool_choice")
    if not isinstance(renderer.parser, HermesParser):
        raise bad_request(
            "tool_choice must be auto or none for this model: its call format cannot be prefilled", "tool_choice"
        )
    text = f"{HermesParser.marks[0]}\n"
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise bad_request(f"tool '{choice.function.name}' does not exist; tools: {', '.join(names)}", "tool_choice")
        text += f'{{"name": {json.dumps(choice.function.name)}, "arguments":'
    ids: Any = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))

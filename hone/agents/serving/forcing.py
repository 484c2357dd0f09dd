"""``tool_choice`` that asks for a call: the beginning of one is put into the model's mouth."""

from __future__ import annotations

import json
from typing import Any

from hone.agents.parsers.hermes import HermesParser
from hone.agents.rendering import Renderer
from hone.agents.serving.errors import bad_request
from hone.agents.serving.wire import ChatBody, NamedTool


def forced_ids(renderer: Renderer, body: ChatBody) -> list[int]:
    """Tokens to put behind the prompt, so that the reply can only be a call; none when the model may choose.

    They are given, not sampled: no log-prob is reported for them, and they are not trained on.

    Raises:
        ApiError: there is no such tool, or calls of this model's format cannot be begun.
    """
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return []
    names = [_name(tool) for tool in body.tools]
    if not names:
        raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
    if not isinstance(renderer.parser, HermesParser):
        raise bad_request(
            "tool_choice can be auto or none for this model: a call in its format cannot be begun", "tool_choice"
        )
    text = f"{HermesParser.marks[0]}\n"
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise bad_request(f"there is no tool '{choice.function.name}' among {', '.join(names)}", "tool_choice")
        text += f'{{"name": {json.dumps(choice.function.name)}, "arguments":'
    ids: Any = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))

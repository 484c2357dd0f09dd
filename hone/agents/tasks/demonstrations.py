"""Messages of demonstration conversations with tools."""

from __future__ import annotations

import json
from typing import Any


def calls(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def result(name: str, content: str, number: int = 0) -> dict[str, Any]:
    """Return the tool message that answers a call."""
    return {"role": "tool", "name": name, "tool_call_id": f"call_{number}", "content": content}


def says(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}

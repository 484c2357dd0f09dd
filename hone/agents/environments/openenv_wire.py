"""Client side of the OpenEnv wire protocol, on the library websockets.

The server, with the dependencies of its environment, runs elsewhere.

Source: the wire format of openenv 0.10, ``/schema`` and ``/ws`` (reset, step, close; observation, error).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.errors import ConfigError, NoVerdict

OPEN_SECONDS = 10.0
"""Seconds that a server has to accept a connection."""
MAX_MESSAGE_BYTES = 16 * 2**20
WHERE = "extra_info.environment.options"


class OpenEnvError(NoVerdict):
    """Error of an OpenEnv server or of the connection to it."""


@dataclass(frozen=True)
class Interface:
    """Form of the actions that a server accepts."""

    text: str | None  # action field that takes the turn; None if the policy acts by calling tools
    tools: tuple[dict[str, Any], ...]  # function schemas of these tools
    mcp: bool = False  # True for the tools of an MCP environment; False if the tool is the action itself


class RefusedAction(OpenEnvError):
    """Error for an action that does not fit the server's schema; the policy can correct it."""


class ServerFullError(OpenEnvError):
    """Error of a server that has reached its maximum number of sessions."""


def read_observation(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the observation in a server's answer, with reward and done."""
    data = answer.get("data")
    if answer.get("type") == "observation" and isinstance(data, dict) and isinstance(data.get("observation"), dict):
        return data
    if answer.get("type") != "error" or not isinstance(data, dict):
        raise OpenEnvError(f"the server {url} answered with {answer!r:.300}")
    message, code = str(data.get("message")), data.get("code")
    if code == "VALIDATION_ERROR":
        wrong = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in data.get("errors", ())]
        raise RefusedAction("; ".join(wrong) or message)
    raise (ServerFullError if code == "CAPACITY_REACHED" else OpenEnvError)(f"{message} ({code})")


async def connect(url: str) -> Any:
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    try:
        return await connect(_websocket(url), open_timeout=OPEN_SECONDS, max_size=MAX_MESSAGE_BYTES)
    except (OSError, TimeoutError, WebSocketException) as error:
        raise OpenEnvError(f"the server {url} does not answer: {error}") from error


@functools.lru_cache(maxsize=64)
def action_interface(url: str, text: str | None) -> Interface:
    """Return how the policy acts on a server; requested once per process."""
    import httpx2

    try:
        import websockets
    except ImportError as error:
        raise ConfigError(
            "the environment 'openenv' needs the package websockets, which is not installed",
            fix="pip install 'hone-rl[environments]'",
        ) from error
    try:
        answer = httpx2.get(f"{url}/schema", timeout=OPEN_SECONDS).raise_for_status()
        action = answer.json()["action"]
        fields = dict(action.get("properties", {}))
        if "tool_name" in fields:
            return Interface(None, tuple(_mcp_tools(url)), mcp=True)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, KeyError, OpenEnvError) as error:
        raise ConfigError(
            f"the OpenEnv server {url} did not give its schema: {type(error).__name__}: {error}",
            why="the environment runs on that server; Hone is only a client",
            fix="start it and give its address: url=http://127.0.0.1:8000",
            where=f"{WHERE}.url",
        ) from error
    except websockets.exceptions.WebSocketException as error:
        raise ConfigError(f"the OpenEnv server {url} has no /ws: {error}", where=f"{WHERE}.url") from error
    return _interface(url, action, fields, text)


def _interface(url: str, action: Mapping[str, Any], fields: dict[str, Any], text: str | None) -> Interface:
    fields.pop("metadata", None)
    if text is not None:
        if text not in fields:
            raise ConfigError(
                f"the actions of {url} have no field '{text}'; they have {sorted(fields)}",
                where=f"{WHERE}.text",
                fix="use one of these fields, or omit it",
            )
        return Interface(text, ())
    required = [name for name in action.get("required", ()) if name in fields]
    texts = [name for name in required or fields if fields[name].get("type") == "string" and "enum" not in fields[name]]
    if len(texts) == 1 and len(required or fields) == 1:
        return Interface(texts[0], ())
    parameters: dict[str, Any] = {"type": "object", "properties": fields, "required": required}
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    about = str(action.get("description") or "Take an action.").split("\n\n")[0]
    return Interface(
        None, ({"type": "function", "function": {"name": "act", "description": about, "parameters": parameters}},)
    )


def _mcp_tools(url: str) -> list[dict[str, Any]]:
    from websockets.sync.client import connect as connect_sync

    with connect_sync(_websocket(url), open_timeout=OPEN_SECONDS, max_size=MAX_MESSAGE_BYTES) as socket:
        socket.send(json.dumps({"type": "step", "data": {"type": "list_tools"}}))
        observation = read_observation(json.loads(socket.recv(timeout=OPEN_SECONDS)), url)["observation"]
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in observation["tools"]
    ]


def _websocket(url: str) -> str:
    return f"ws{url.removeprefix('http')}/ws"

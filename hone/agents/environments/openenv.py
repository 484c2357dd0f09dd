"""Adapter for environments on an OpenEnv server; every episode has its session on its WebSocket.

The schema that the server publishes determines how a turn becomes an action:

- an action with one text (``{"message": "..."}``) takes the text of the turn;
- the tools of an MCP environment are offered to the policy, and its calls are the actions;
- any other action is offered as a function tool, ``act``, with the action's fields as its parameters.

The server, with the dependencies of its environment, runs elsewhere. Source: the wire format of openenv 0.10, ``/schema`` and
``/ws`` (reset, step, close; observation, error).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message, ToolCall, tool_message
from hone.errors import ConfigError, NoVerdict
from hone.extras import install_command
from hone.text import valid_data

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
            fix=install_command("environments"),
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


SESSION_WAIT_SECONDS = 5.0
"""Seconds to wait for a session on a full server, which frees ended sessions with a delay."""
_HIDDEN_FIELDS = ("metadata", "reward", "done")


class OpenEnv(Environment):
    """Environment with one session on an OpenEnv server.

    Facts: ``solved`` (the rewards sum to more than 0), ``steps``, ``invalid_action`` (the server refused the last action).
    """

    def __init__(
        self,
        *,
        url: str,  # address of the server, for example ``http://127.0.0.1:8000``
        text: str | None = None,  # action field that takes the turn; None chooses it by the server's schema
        # observation field that the policy sees; None means its only text field, else all fields as JSON
        shown: str | None = None,
        prompt: str = "",  # text before the first observation
        reset: dict[str, Any] | None = None,  # further arguments of the server's ``reset``
    ) -> None:
        self.url, self.shown, self.prompt, self.arguments = url.rstrip("/"), shown, prompt, reset or {}
        self.interface = action_interface(self.url, text)
        self.tools = valid_data(self.interface.tools)
        self._socket: Any = None
        self._total, self._steps = 0.0, 0

    async def reset(self, seed: int) -> list[Message]:
        self._total, self._steps = 0.0, 0
        await self.close()
        answer = await self._begin({**self.arguments, "seed": seed})
        words = f"{self.prompt}\n{self._words(answer['observation'])}".strip()
        if not words:
            raise ConfigError(
                f"the OpenEnv server {self.url} returns an empty observation on reset",
                why="the policy would receive an empty prompt",
                fix='add "prompt": "DESCRIBE THE TASK" to the options of the environment',
                where=WHERE,
            )
        return [{"role": "user", "content": words}]

    async def step(self, turn: AssistantTurn) -> Step:
        if self.interface.text is not None:
            answer, refusal = await self._act({self.interface.text: turn.content})
            words = refusal if answer is None else self._words(answer["observation"])
            return self._step([{"role": "user", "content": words}], [answer])
        if not turn.calls:
            return self._step([], [], done=True)
        messages, answers = [], []
        for call in turn.calls:
            answer, words = await self._call(call)
            messages.append(tool_message(call, words))
            answers.append(answer)
            if answer is not None and answer.get("done"):
                break
        return self._step(messages, answers)

    async def close(self) -> None:
        """End the session; the server frees its environment."""
        socket, self._socket = self._socket, None
        if socket is not None:
            from websockets.exceptions import WebSocketException

            with contextlib.suppress(WebSocketException, OSError):  # the connection may already be closed
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()

    # ---------------------------------------------------------------------------------------------------------------

    async def _call(self, call: ToolCall) -> tuple[dict[str, Any] | None, str]:
        """Return the server's answer (None if it refused the call) and the text for the policy."""
        names = [schema["function"]["name"] for schema in self.tools]
        if call.arguments is None or call.name not in names:
            return None, call.error or f"there is no function {call.name}; there are: {', '.join(names)}"
        action = call.arguments
        if self.interface.mcp:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        answer, refusal = await self._act(action)
        if answer is None:
            return None, refusal
        observation = answer["observation"]
        return answer, _mcp_words(observation) if self.interface.mcp else self._words(observation)

    async def _act(self, action: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        self._steps += 1
        try:
            return await self._ask("step", action), ""
        except RefusedAction as refused:
            return None, f"this action cannot be taken: {refused}"

    def _step(self, messages: list[Message], answers: list[dict[str, Any] | None], *, done: bool = False) -> Step:
        taken = [answer for answer in answers if answer is not None]
        reward = float(sum(answer.get("reward") or 0.0 for answer in taken))
        self._total += reward
        facts = {
            "solved": float(self._total > 0),
            "steps": float(self._steps),
            "invalid_action": float(len(taken) < len(answers)),
        }
        return Step(messages, reward, done or any(answer.get("done") for answer in taken), facts)

    async def _begin(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session and reset it; retry for a few seconds while the server is full."""
        clock = asyncio.get_running_loop().time
        until = clock() + SESSION_WAIT_SECONDS
        while True:
            self._socket = await connect(self.url)
            try:
                return await self._ask("reset", arguments)
            except ServerFullError as full:
                await self.close()
                if clock() > until:
                    raise ConfigError(
                        f"the OpenEnv server {self.url} is full: {full}",
                        why="every concurrent episode needs its session",
                        fix="raise max_concurrent_envs of the server, or play fewer episodes at a time: "
                        "actor_rollout_ref.rollout.agent.max_concurrent_episodes=1",
                        where=WHERE,
                    ) from None
            await asyncio.sleep(0.1)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # the reason may already be in the receive buffer
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as closed:
            raise OpenEnvError(f"the server {self.url} closed the session: {closed}") from None
        return read_observation(answer, self.url)

    def _words(self, observation: Mapping[str, Any]) -> str:
        if self.shown is not None:
            if self.shown not in observation:
                raise ConfigError(
                    f"an observation of {self.url} has no field '{self.shown}'; it has {sorted(observation)}",
                    where=f"{WHERE}.shown",
                    fix="use one of these fields",
                )
            value = observation[self.shown]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        fields = {key: value for key, value in observation.items() if key not in _HIDDEN_FIELDS and value is not None}
        texts = [value for value in fields.values() if isinstance(value, str)]
        if len(fields) == len(texts) == 1:
            return texts[0]
        return json.dumps(fields, ensure_ascii=False) if fields else ""


def _mcp_words(observation: Mapping[str, Any]) -> str:
    """Return the text, the value or the error of an MCP tool's result."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        texts = [part["text"] for part in result["content"] if isinstance(part, Mapping) and "text" in part]
        result = "\n".join(texts) if texts else result.get("data")
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

"""Tools of MCP servers (Model Context Protocol) by the official client, over stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hone.agents.messages import text_of_parts
from hone.agents.tools.base import Tool, ToolError, ToolResult
from hone.errors import ConfigError, NoVerdict, did_you_mean
from hone.extras import install_command

START_SECONDS = 30.0
_MOST_TOOLS, _MOST_CHARACTERS = 1000, 2**24
"""Tools and pages of their list that a server may have, and characters of an answer, images included."""
_OPTIONS = {"stdio": ("command", "args", "env", "cwd"), "http": ("url",)}


class McpServer:
    """Connection to one server, held by a thread with an event loop that outlives the loops of a run.

    A broken connection is reopened at the next call. ``options`` are ``command``, ``args``, ``env`` and ``cwd`` of a program,
    or the ``url`` of a server.
    """

    def __init__(self, options: dict[str, Any], where: str) -> None:
        self.target, self.where = _target(options, where), where
        self._name = str(options.get("url") or options.get("command"))
        self._printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp {self._name}", daemon=True)
        self._thread.start()
        self._client: Any = None
        self._stop: asyncio.Event | None = None
        self._holding: Future[None] | None = None
        self.tools: list[Any] = self._connect()
        atexit.register(self.close)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call the server's tool ``name`` and return its answer.

        Raises:
            NoVerdict: the connection is lost, or cannot be opened again.
        """
        if self._holding is None or self._holding.done():
            try:
                await asyncio.to_thread(self._connect)
            except ConfigError as error:
                raise NoVerdict(error.what) from error
        future = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:
            if _is_closed(error):
                await asyncio.to_thread(self._disconnect)
                raise NoVerdict(f"the connection to the MCP server '{self._name}' was closed") from error
            raise

    def close(self) -> None:
        """Close the connection and end the program."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        self._disconnect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _connect(self) -> list[Any]:
        """Connect, and return the tools that the server lists."""
        self._disconnect()
        ready: Future[list[Any]] = Future()
        self._holding = asyncio.run_coroutine_threadsafe(self._hold(ready), self._loop)
        try:
            return ready.result(START_SECONDS)
        except Exception as error:
            self._disconnect()
            reason = (
                f"no answer within {START_SECONDS:g} seconds" if isinstance(error, TimeoutError) else _reason(error)
            )
            printed = self._last_lines()
            raise ConfigError(
                f"the MCP server '{self._name}' cannot be reached: {reason}"
                + (f"; it printed: {printed}" if printed else ""),
                why="its tools cannot be called without it",
                fix="start the server, or correct command, args or url",
                where=self.where,
            ) from error

    def _last_lines(self) -> str:
        """Return the end of what the server's program printed on standard error, which is kept out of the run's output."""
        self._printed.seek(0)
        return " / ".join(self._printed.read().strip().splitlines()[-3:])[-500:]

    async def _hold(self, ready: Future[list[Any]]) -> None:
        """Keep the connection open until stopped; the client must be closed by the task that opened it."""
        from mcp import Client
        from mcp.client.stdio import stdio_client

        self._stop = asyncio.Event()
        target = self.target if isinstance(self.target, str) else stdio_client(self.target, errlog=self._printed)
        try:
            async with Client(target) as client:
                tools, cursor = [], None
                for _ in range(_MOST_TOOLS):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if len(tools) > _MOST_TOOLS or page.next_cursor == cursor is not None:
                        raise RuntimeError(f"its list of tools has no end: {len(tools)} so far")
                    cursor = page.next_cursor
                    if not cursor:
                        break
                else:
                    raise RuntimeError(f"its list of tools has no end after {_MOST_TOOLS} pages")
                self._client = client
                ready.set_result(tools)
                await self._stop.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _disconnect(self) -> None:
        held, stop = self._holding, self._stop
        if held is None or held.done():
            return
        if stop is not None:
            self._loop.call_soon_threadsafe(stop.set)
        try:
            held.result(START_SECONDS)
        except Exception:  # noqa: BLE001 - the connection ends in any case; callers have received its error
            held.cancel()


class McpTool(Tool):
    """Tool of an MCP server."""

    def __init__(self, server: McpServer, description: Any) -> None:
        function = {
            "name": description.name,
            "description": description.description or "",
            "parameters": description.input_schema,
        }
        super().__init__({"type": "function", "function": function})
        self.server = server

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> ToolResult:
        answer = await self.server.call(self.name, arguments)
        size = sum(len(getattr(part, "text", None) or getattr(part, "data", None) or "") for part in answer.content)
        if size > _MOST_CHARACTERS:
            raise ToolError(f"the answer has {size} characters, more than {_MOST_CHARACTERS}: ask for less")
        parts = [_part(part) for part in answer.content]
        text, left_out = text_of_parts(parts)
        if answer.is_error:
            raise ToolError(text or "the call failed")
        return ToolResult(text, left_out=left_out, parts=tuple(parts) if left_out else ())

    def close(self) -> None:
        self.server.close()


def _part(part: Any) -> dict[str, Any]:
    shown = {"type": part.type, "text": getattr(part, "text", None)}
    return shown | {"image": f"data:{part.mime_type};base64,{part.data}"} if part.type == "image" else shown


def tools_of_server(options: dict[str, Any], *, only: Sequence[str] | None = None, where: str = "") -> list[McpTool]:
    """Return the tools of a server, or those listed in ``only``."""
    server = McpServer(options, where)
    tools = {description.name: McpTool(server, description) for description in server.tools}
    for name in only or ():
        if name not in tools:
            server.close()
            raise ConfigError(f"the server has no tool '{name}'", where=where, fix=did_you_mean(name, tools))
    return [tool for name, tool in tools.items() if only is None or name in only]


def _target(options: dict[str, Any], where: str) -> Any:
    kind = "http" if "url" in options else "stdio"
    for name in options:
        if name not in _OPTIONS[kind]:
            raise ConfigError(f"unknown setting '{name}' of mcp", where=where, fix=did_you_mean(name, _OPTIONS[kind]))
    if kind == "stdio" and not options.get("command"):
        raise ConfigError(
            "mcp has neither a command nor a url", where=where, fix="mcp: {command: python, args: [server.py]}"
        )
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise ConfigError(
            "tools of MCP servers need the package mcp, which is not installed",
            where=where,
            fix=install_command("mcp"),
        ) from error
    return options["url"] if kind == "http" else StdioServerParameters(**options)


def _is_closed(error: Exception) -> bool:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code == CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

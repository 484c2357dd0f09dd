"""Tools of real MCP servers: a program on stdio, and streamable HTTP."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.environments import npm_folder
from support.messages import raises
from support.patience import SOON
from support.services import free_port

from hone.agents.tools import ToolError
from hone.agents.tools.loading import tools_of_yaml
from hone.agents.tools.mcp import McpTool
from hone.errors import ConfigError

pytestmark = pytest.mark.application("hone/agents/tools")

pytest.importorskip("mcp")
SERVER = Path(__file__).parent.parent / "support/mcp_server.py"


def loaded(folder: Path, entry: str) -> dict[str, McpTool]:
    path = folder / "tools.yaml"
    path.write_text(f"tools:\n  - {entry}\n")
    return {tool.name: tool for tool in tools_of_yaml(path)}  # type: ignore[misc]


def ask(tool: McpTool, **arguments) -> str:
    return asyncio.run(tool.execute(None, arguments)).text


def test_a_program_on_stdio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hone.agents.tools.mcp._MOST_CHARACTERS", 1000)
    tools = loaded(tmp_path, f"mcp: {{command: {sys.executable}, args: [{SERVER}, stdio]}}")
    try:
        assert set(tools) == {"add", "draw", "fail", "large", "leave"}
        function = tools["add"].schema["function"]
        assert function["description"] == "Add two numbers." and function["parameters"]["required"] == ["a", "b"]
        assert ask(tools["add"], a=2, b=3) == "5"
        drawn = asyncio.run(tools["draw"].execute(None, {}))
        assert (drawn.text, drawn.left_out) == ("(image left out: the model reads text only)", 1)
        assert ask(tools["add"], a=2, b=4) == "6", "the connection outlives an event loop"
        with pytest.raises(ToolError, match="fail"):
            ask(tools["fail"], reason="no luck")
        with pytest.raises(ToolError, match="5000 "):
            ask(tools["large"])
        with pytest.raises(Exception):  # noqa: B017 - whatever the client says when its server is gone
            asyncio.run(asyncio.wait_for(tools["leave"].execute(None, {}), 2.0))
        assert ask(tools["add"], a=1, b=1) == "2", "the connection is made anew"
    finally:
        tools["add"].close()
    assert not tools["add"].server._thread.is_alive()


def test_settings_as_other_clients_write_them_and_no_banner(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    server = f"{{command: {sys.executable}, args: [{SERVER}, stdio, banner], type: stdio, only: [add], timeout: 7}}"
    path = tmp_path / "tools.yaml"
    path.write_text(f"mcpServers:\n  arithmetic: {server}\n")
    (tool,) = tools_of_yaml(path)
    try:
        assert tool.name == "add" and tool.timeout == 7 and ask(tool, a=2, b=3) == "5"  # type: ignore[arg-type]
    finally:
        tool.close()
    assert "banner" not in capfd.readouterr().err
    path.write_text(f"mcpServers:\n  broken: {{command: {sys.executable}, args: [-c, 'print(1/0)']}}\n")
    with raises(ConfigError, "ZeroDivisionError"):
        tools_of_yaml(path)


def test_a_server_on_http(tmp_path: Path):
    port = free_port()
    server = subprocess.Popen([sys.executable, str(SERVER), "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        tools = loaded(tmp_path, f"mcp: {{url: 'http://127.0.0.1:{port}/mcp'}}\n    only: [add]")
        assert set(tools) == {"add"} and ask(tools["add"], a=20, b=22) == "42"
        tools["add"].close()
    finally:
        server.terminate()
        server.wait(SOON)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mcp: {command: /no/such/program}", "/no/such/program"),
        ("mcp: {comand: x}", "comand"),
        ("mcp: {}", "mcp: {command: python, args: [server.py]}"),
    ],
)
def test_servers_that_cannot_be_used(tmp_path: Path, entry: str, words: str):
    with raises(ConfigError, words):
        loaded(tmp_path, entry)


ENDLESS = """
import json, sys
for line in sys.stdin:
    asked, answer = json.loads(line), None
    if "id" not in asked: continue
    if asked["method"] == "initialize":
        answer = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "e", "version": "1"}}
    elif asked["method"] == "tools/list":
        cursor = int((asked.get("params") or {}).get("cursor") or 0)
        tools = [{"name": f"t{cursor}-{n}", "inputSchema": {"type": "object"}} for n in range(TOOLS)]
        answer = {"tools": tools, "nextCursor": str(NEXT)}
    outcome = {"result": answer} if answer else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **outcome}), flush=True)
"""


@pytest.mark.parametrize(("tools", "following"), [(100, "cursor + 1"), (0, "cursor + 1"), (0, "7")])
def test_a_list_of_tools_without_end_is_refused(tmp_path: Path, tools: int, following: str) -> None:
    (tmp_path / "server.py").write_text(ENDLESS.replace("TOOLS", str(tools)).replace("NEXT", following))
    with raises(ConfigError, "no end"):
        loaded(tmp_path, f"mcp: {{command: {sys.executable}, args: [{tmp_path / 'server.py'}]}}")


@pytest.mark.long("hone/agents/tools")
def test_the_server_from_npm_by_which_clients_are_tested(tmp_path: Path):
    folder = npm_folder("server-everything", "@modelcontextprotocol/server-everything@2026.8.31")
    program = folder / "node_modules" / ".bin" / "mcp-server-everything"
    tools = loaded(tmp_path, f"mcp: {{command: {program}, args: [stdio], only: [get-sum, echo, get-tiny-image]}}")
    try:
        assert set(tools) == {"get-sum", "echo", "get-tiny-image"}
        assert set(tools["get-sum"].schema["function"]["parameters"]["required"]) == {"a", "b"}
        assert ask(tools["get-sum"], a=2, b=3) == "The sum of 2 and 3 is 5."
        assert ask(tools["echo"], message="é") == "Echo: é"
        assert asyncio.run(tools["get-tiny-image"].execute(None, {})).left_out == 1
        with raises(ToolError):
            ask(tools["get-sum"], a="two", b=3)
    finally:
        tools["echo"].close()

"""Loading of tools from a YAML file (``multi_turn.tool_config_path``) and Python files (``multi_turn.function_tool_path``).

    tools:
      - name: calculator                        # a built-in tool
      - name: search                            # ... with settings
        config: {files: corpus.jsonl, k: 3}
      - class_name: my_tools.Weather            # your class: Weather(config, tool_schema)
        config: {unit: celsius}
        tool_schema: {type: function, function: {name: weather, description: ..., parameters: {...}}}
      - function: my_tools:convert              # a decorated or a documented function
        timeout: 5
      - mcp: {command: python, args: [server.py]}   # or {url: http://localhost:8000/mcp}
        only: [read_file]

Every entry accepts ``timeout`` (seconds), ``retries``, ``concurrency``, and ``noise: {failure_rate, latency, seed}``, which adds
random failures and delays to train robust policies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.agents.tools.base import FunctionTool, NoiseOptions, Noisy, Tool, Toolbox
from hone.config.agents import MultiTurnConfig
from hone.errors import ConfigError, HoneError, did_you_mean
from hone.registry import Registry, imported
from hone.user_code import UserCodeError, load_file
from hone.user_objects import is_user_object, user_object

PATH_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
_COMMON = ("timeout", "retries", "concurrency")
_BESIDES_KIND = (*_COMMON, "noise", "only")
"""Keys of an entry besides its kind and the settings of that."""
_SERVERS = "mcpServers"
"""Mapping of servers by name, as other clients of MCP write it."""
_OF_OTHER_CLIENTS = ("type", "disabled", "autoApprove")
"""Keys of such a server that have no meaning here."""
_KINDS = ("name", "class_name", "function", "mcp")

BUILT_IN: Registry[Callable[..., Tool]] = Registry("built-in tool", key=PATH_KEY)
"""Classes of the built-in tools by name; the arguments are the entry's ``config``."""
for _name, _class in (
    ("calculator", "Calculator"),
    ("search", "Search"),
    ("python", "PythonTool"),
    ("lookup", "Lookup"),
):
    BUILT_IN.register_later(f"hone.agents.tools.{_name}:{_class}", _name)


def load_toolbox(multi_turn: MultiTurnConfig) -> Toolbox:
    """Load the tools of all files, and those of this process.

    Raises:
        ConfigError: a file is missing or invalid (with its line), a tool cannot be made, or a name occurs twice.
    """
    tools: list[Tool] = []
    if multi_turn.tool_config_path:
        tools += tools_of_yaml(Path(multi_turn.tool_config_path))
    paths = multi_turn.function_tool_path or []
    for path in [paths] if isinstance(paths, str) else paths:
        tools += [tool_from_object(user_object(path).value)] if is_user_object(path) else tools_of_python(Path(path))
    return Toolbox(tools, multi_turn)


def tool_from_object(value: Any) -> Tool:
    """Return a tool from an object of Python: a tool, the name of a built-in one, or a function with type hints and a docstring."""
    if isinstance(value, Tool):
        return value
    if isinstance(value, str):
        return BUILT_IN.get(value)()
    if inspect.isroutine(value):
        return FunctionTool(value)
    described = f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
    raise ConfigError(
        f"a tool is {described}, not a function, a built-in tool or an object of a class derived from Tool",
        where="tools",
        fix="tools=[my_function], tools=['calculator'], or tools=[MyTool(...)]",
    )


def tools_of_yaml(path: Path) -> list[Tool]:
    """Load the tools of a YAML file."""
    content = read_yaml(path, PATH_KEY)
    entries = content.get("tools") if isinstance(content, dict) else content
    servers = content.get(_SERVERS) if isinstance(content, dict) else None
    servers = servers if isinstance(servers, dict) else {}
    if not (isinstance(entries, list) and entries) and not servers:
        raise ConfigError(f"'{path}' lists no tools", fix="add tools:\n    - name: calculator", where=PATH_KEY)
    tools: list[Tool] = []
    named = [(f"{path}, tool {number}", entry) for number, entry in enumerate(entries or [], start=1)]
    for where, entry in [*named, *((f"{path}, server {name}", {"mcp": server}) for name, server in servers.items())]:
        if not isinstance(entry, dict):
            raise ConfigError(f"a tool is {entry!r}, not a mapping", where=where, fix="write - name: calculator")
        tools += _entry_tools(entry, where)
    return tools


def tools_of_python(path: Path) -> list[Tool]:
    """Load the functions of a Python file that are decorated with @tool."""
    key = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
    if not path.is_file():
        raise missing_file(path, key)
    try:
        module = load_file(path, f"hone_tools_{path.stem}")
    except UserCodeError as error:
        if isinstance(error.__cause__, HoneError):
            raise error.__cause__ from None
        raise ConfigError(error.what, where=key, fix=error.fix) from error
    tools: list[Tool] = [value for value in vars(module).values() if isinstance(value, Tool)]
    if not tools:
        raise ConfigError(
            f"'{path}' has no tool",
            where=key,
            fix="write @tool (from hone.agents.tools import tool) above its functions",
        )
    return tools


def _entry_tools(entry: Mapping[str, Any], where: str) -> list[Tool]:
    entry = _with_server_keys(entry, where)
    kinds = [kind for kind in _KINDS if kind in entry]
    known_keys = {*_KINDS, *_BESIDES_KIND, "config", "tool_schema"}
    unknown = [key for key in entry if key not in known_keys]
    if unknown:
        raise ConfigError(f"unknown key '{unknown[0]}'", where=where, fix=did_you_mean(unknown[0], known_keys))
    if len(kinds) != 1:
        raise ConfigError(
            f"the entry has {' and '.join(kinds) or 'no kind'}, but needs exactly one of {', '.join(_KINDS)}",
            where=where,
            fix="for example - name: calculator",
        )
    makers = {"name": _built_in_tools, "class_name": _class_tools, "function": _function_tools, "mcp": _server_tools}
    tools = makers[kinds[0]](entry, where)
    for tool in tools:
        for name in _COMMON:
            if entry.get(name) is not None:
                setattr(tool, name, _number(entry, name, where))
    if entry.get("noise"):
        options = _call(NoiseOptions, dict(entry["noise"]), where)
        return [Noisy(tool, options) for tool in tools]
    return tools


def _built_in_tools(entry: Mapping[str, Any], where: str) -> list[Tool]:
    return [_call(BUILT_IN.get(str(entry["name"])), _settings(entry, where), where)]


def _class_tools(entry: Mapping[str, Any], where: str) -> list[Tool]:
    module, _, name = str(entry["class_name"]).rpartition(".")
    cls = imported(f"{module}:{name}", where)
    if not (inspect.isclass(cls) and issubclass(cls, Tool)):
        raise ConfigError(
            f"{entry['class_name']} is not a subclass of Tool",
            where=where,
            fix="derive the class from hone.agents.tools.Tool",
        )
    schema = entry.get("tool_schema")
    if schema is not None:
        _check_schema(schema, where)
    arguments: dict[str, Any] = {"config": _settings(entry, where)} | ({"tool_schema": schema} if schema else {})
    return [_call(cls, arguments, where)]


def _function_tools(entry: Mapping[str, Any], where: str) -> list[Tool]:
    target, schema = imported(str(entry["function"]), where), entry.get("tool_schema")
    if schema is not None:
        _check_schema(schema, where)
    if isinstance(target, FunctionTool):
        return [FunctionTool(target.function, schema=schema or target.schema)]
    if not callable(target):
        raise ConfigError(f"{entry['function']} is a {type(target).__name__}, not a function", where=where)
    return [FunctionTool(target, schema=schema)]


def _server_tools(entry: Mapping[str, Any], where: str) -> list[Tool]:
    from hone.agents.tools.mcp import tools_of_server

    return list(tools_of_server(dict(entry["mcp"] or {}), only=entry.get("only"), where=where))


def _with_server_keys(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return an entry whose keys of the tools are next to ``mcp``, where they may also be inside it."""
    server = entry.get("mcp")
    if not isinstance(server, dict):
        return entry
    inside = {name: value for name, value in server.items() if name in _BESIDES_KIND}
    twice = next((name for name in inside if name in entry), None)
    if twice is not None:
        raise ConfigError(f"'{twice}' is both inside mcp and next to it", where=where, fix=f"write {twice} once")
    rest = {name: value for name, value in server.items() if name not in inside and name not in _OF_OTHER_CLIENTS}
    return {**entry, **inside, "mcp": rest}


def _settings(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"config is {config!r}, not a mapping", where=where, fix="config: {key: value}")
    return {key: value for key, value in config.items() if key != "type"}  # `type: native` has no effect


def _check_schema(schema: Any, where: str) -> None:
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            "tool_schema has no function with a name",
            where=where,
            fix="tool_schema: {type: function, function: {name: ..., description: ..., parameters: {...}}}",
        )


def _number(entry: Mapping[str, Any], name: str, where: str) -> float | int:
    value = entry[name]
    lowest = 0 if name == "retries" else 1 if name == "concurrency" else 1e-9
    if isinstance(value, bool) or not isinstance(value, int | float) or value < lowest:
        raise ConfigError(
            f"{name}={value!r} is not a number of at least {lowest:g}",
            where=where,
            fix=f"{name}: {30 if name == 'timeout' else 1}",
        )
    return value


def _call(maker: Callable[..., Any], arguments: dict[str, Any], where: str) -> Any:
    """Make a tool; errors are raised with the entry's place in the file."""
    try:
        return maker(**arguments)
    except HoneError:
        raise
    except (TypeError, ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"the tool cannot be made: {error}", where=where, fix="see its settings in docs/agents.md"
        ) from error


def read_yaml(path: Path, key: str) -> Any:
    """Return the content of a YAML file."""
    if not path.is_file():
        raise missing_file(path, key)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"'{path}'{line} is not valid YAML: {reason}", where=key, fix="correct the line") from error


def missing_file(path: Path, key: str) -> ConfigError:
    """Return the error for a file that does not exist, with the closest name in its folder."""
    near = [file.name for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
    fix = did_you_mean(path.name, near) if near else f"put it there: {path.parent} has no file *{path.suffix}"
    return ConfigError(
        f"file '{path}' does not exist", why="its tools would be missing", fix=fix, where=key, code="R33"
    )

"""Base class of tools, each with a schema for the model and a life cycle within an episode."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from hone.agents.messages import is_parts, text_of_parts
from hone.errors import ConfigError
from hone.text import valid_data

Schema = dict[str, Any]


def text_schema(name: str, description: str, parameter: str, meaning: str | None = None) -> Schema:
    """Return the schema of a function with one argument, a text."""
    kind = {"type": "string"} if meaning is None else {"type": "string", "description": meaning}
    parameters = {"type": "object", "properties": {parameter: kind}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class ToolError(Exception):
    """Error that a retry would not resolve (division by zero); the model receives its text."""


@dataclass
class ToolResult:
    """Result of a tool call.

    Attributes:
        text: text for the model.
        reward: added to the reward of the turn that made the call.
        metrics: named numbers, logged as ``tool/<tool>/<name>``.
        left_out: number of non-text parts (images), each replaced by a note in the text.
        parts: the parts of a result with images, for a policy that reads them; empty for others.
    """

    text: str
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    parts: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @classmethod
    def from_value(cls, value: Any) -> ToolResult:
        """Convert a tool's return value: text, parts in OpenAI's form, JSON data, or (value, reward[, metrics]).

        >>> ToolResult.from_value(("7", 0.5))
        ToolResult(text='7', reward=0.5, metrics={}, left_out=0)

        Raises:
            TypeError: the value has another form.
        """
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, tuple):
            if len(value) not in (2, 3):
                raise TypeError(
                    f"a tool returns a value, (value, reward) or (value, reward, metrics), not {len(value)} values"
                )
            result = cls.from_value(value[0])
            metrics = dict(value[2]) if len(value) == 3 else {}
            return dataclasses.replace(result, reward=float(value[1]), metrics=metrics)
        if is_parts(value):
            text, left_out = text_of_parts(value)
            return cls(text, left_out=left_out, parts=tuple(value) if left_out else ())
        return cls(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


class Tool(ABC):
    """Tool of a run. One object serves all episodes; each episode has its ``state``.

        create -> execute, execute, ... -> calc_reward -> release

    An episode's state is created at its first call, and released when the episode is over, however it ended.
    ``extra_info.tools_kwargs.<name>`` of a dataset row has additional arguments for the four methods: ``create_kwargs``,
    ``execute_kwargs``, ``calc_reward_kwargs`` and ``release_kwargs``. Its ``noise`` makes the tool fail at random in the episodes of
    the row (:class:`~hone.agents.tools.toolbox.NoiseOptions`).

    An ``execute`` that never awaits runs in the order of the calls, so that a run is reproducible bit for bit. Blocking work (files,
    computation) belongs in a thread or a process.

    Args:
        schema: OpenAI function schema.

    Attributes:
        name: name of the function.
        timeout: seconds for one call; None means ``multi_turn.tool_timeout``.
        retries: tries after the first; None means ``multi_turn.tool_retries``.
        concurrency: maximum concurrent calls; None means ``multi_turn.tool_concurrency``.
    """

    timeout: float | None = None
    retries: int | None = None
    concurrency: int | None = None

    def __init__(self, schema: Schema) -> None:
        self.schema: Schema = valid_data(schema)  # a server may have written it
        self.name: str = self.schema["function"]["name"]

    async def create(self, **kwargs: Any) -> Any:
        """Return the state of a new episode."""
        return None

    @abstractmethod
    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Answer one call: return text, JSON data, a :class:`ToolResult`, or (value, reward[, metrics]).

        Args:
            state: state of the episode.
            arguments: arguments of the model, valid by the schema.
            kwargs: ``execute_kwargs`` of the row.

        Raises:
            ToolError: the call cannot be answered; the model receives the text. Other exceptions are retried.
        """

    async def calc_reward(self, state: Any, **kwargs: Any) -> float | None:
        """Return the episode's reward for this tool, or None."""
        return None

    async def release(self, state: Any, **kwargs: Any) -> None:  # noqa: B027 - most have nothing to do
        """Free the state at the end of an episode."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Free resources at the end of the run."""


_MAX_STUCK_CALLS = 64


class FunctionTool(Tool):
    """Tool made from a function with type hints and docstring, or with a schema.

    An ``async def`` runs in the event loop; any other function runs in a new thread, so that it does not block the loop.

    Raises:
        ConfigError: no schema can be derived.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, schema: Schema | None = None) -> None:
        super().__init__(schema or function_schema(function, name))
        self.function = function
        self.__doc__ = function.__doc__
        self._stuck = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            ConfigError: too many calls have not returned after their time limit.
        """
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments, **kwargs)
        if self._stuck >= _MAX_STUCK_CALLS:
            raise ConfigError(
                f"tool '{self.name}' hangs: {self._stuck} calls still run after their time limit",
                why="each occupies a thread",
                fix="give its blocking operation a time limit, or write it as `async def`, which can be cancelled",
                where="actor_rollout_ref.rollout.multi_turn",
            )
        return await self._in_thread({**arguments, **kwargs})

    async def _in_thread(self, arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(setter: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                setter(value)
            else:
                self._stuck -= 1

        def work() -> None:
            try:
                outcome = (future.set_result, self.function(**arguments))
            except Exception as error:  # noqa: BLE001 - the awaiting caller raises it
                outcome = (future.set_exception, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, *outcome)

        # a daemon thread, unlike one of an executor, does not prevent the process from ending if it hangs
        threading.Thread(target=work, name=f"tool {self.name}", daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            self._stuck += 1
            raise


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(*, name: str | None = None, schema: Schema | None = None) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, schema: Schema | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool from a function; also ``@tool(name=..., schema=...)``.

    The schema is derived from type hints and a Google-style docstring:

    >>> @tool
    ... def add(a: int, b: int) -> int:
    ...     \"\"\"Add two numbers.
    ...
    ...     Args:
    ...         a: the first.
    ...         b: the second.
    ...     \"\"\"
    ...     return a + b
    >>> add.schema["function"]["parameters"]["required"]
    ['a', 'b']

    Raises:
        ConfigError: the function lacks type hints or a docstring that names every argument.
    """
    if function is None:
        return lambda decorated: FunctionTool(decorated, name=name, schema=schema)
    return FunctionTool(function, name=name, schema=schema)


def function_schema(function: Callable[..., Any], name: str | None = None) -> Schema:
    """Derive the OpenAI schema of a typed function with a Google-style docstring.

    Raises:
        ConfigError: a type hint or docstring entry is missing.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    try:
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise TypeError("it takes *args or **kwargs, which a schema cannot describe")
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        where = getattr(getattr(function, "__code__", None), "co_filename", "")
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", "")
        raise ConfigError(
            f"cannot derive a tool schema from the function '{function.__name__}': {error}",
            where=f"{where}, line {line}",
            fix="give every argument a type hint and a line under `Args:` of the docstring, or pass @tool(schema={...})",
        ) from error
    schema["function"].pop("return", None)
    if name is not None:
        schema["function"]["name"] = name
    return schema

"""Python functions as tools, with schemas derived from type hints and a Google-style docstring.

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
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, overload

from hone.agents.tools.base import Schema, Tool
from hone.errors import ConfigError

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

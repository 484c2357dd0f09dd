"""Base class of tools, each with a schema for the model and a life cycle within an episode; and the tools of a run.

Every call of an episode is answered, whether it succeeds or not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from hone.agents.messages import Message, ToolCall, is_parts, text_of_parts, tool_message
from hone.config.agents import MultiTurnConfig
from hone.data.episode_log import CallRecord, CallStatus
from hone.data.images import IMAGE_PARTS, read_image
from hone.data.row_images import part_image
from hone.data.seeding import derive_seed
from hone.errors import ConfigError, DataError, HoneError, NoVerdict, did_you_mean
from hone.insight.audit import AuditLog
from hone.text import valid_data, valid_text

if TYPE_CHECKING:  # tool files of users import this module
    from transformers import PreTrainedTokenizerBase

    from hone.agents.episode import Episode

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
    the row (:class:`~hone.agents.tools.base.NoiseOptions`).

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


@dataclass(frozen=True)
class NoiseOptions:
    """Rate of failures and delays of a tool."""

    failure_rate: float = 0.0  # share of failed calls; the model receives the error and may call again
    latency: float = 0.0  # mean seconds that a call waits, drawn from an exponential distribution
    seed: int = 0  # seed of the random numbers

    def __post_init__(self) -> None:
        if not 0 <= self.failure_rate <= 1 or self.latency < 0:
            raise ValueError(f"failure_rate={self.failure_rate} must be in 0..1, and latency={self.latency} at least 0")


@dataclass
class _State:
    inner: Any
    name: str
    calls: int = 0


class Noisy(Tool):
    """Tool with random failures and delays.

    Failures depend on ``options.seed``, the call's arguments and its number in the episode, so a run is reproducible.
    """

    def __init__(self, tool: Tool, options: NoiseOptions) -> None:
        super().__init__(tool.schema)
        self.tool, self.options = tool, options
        self.timeout, self.retries, self.concurrency = tool.timeout, tool.retries, tool.concurrency

    async def create(self, **kwargs: Any) -> _State:
        return _State(await self.tool.create(**kwargs), self.name)

    async def execute(self, state: _State, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Delay, fail or forward the call."""
        state.calls += 1
        draw = random.Random(
            derive_seed(self.options.seed, state.name, json.dumps(arguments, sort_keys=True), state.calls)
        )
        if self.options.latency:
            await asyncio.sleep(draw.expovariate(1 / self.options.latency))
        if draw.random() < self.options.failure_rate:
            raise ToolError("the service is not available, try again")
        return await self.tool.execute(state.inner, arguments, **kwargs)

    async def calc_reward(self, state: _State, **kwargs: Any) -> float | None:
        return await self.tool.calc_reward(state.inner, **kwargs)

    async def release(self, state: _State, **kwargs: Any) -> None:
        await self.tool.release(state.inner, **kwargs)

    def close(self) -> None:
        self.tool.close()


def with_noise(tool: Tool, options: Any) -> Noisy:
    """Return a tool with the noise that a dataset row asks for, which replaces the noise of the run."""
    return Noisy(tool.tool if isinstance(tool, Noisy) else tool, noise_of_row(tool.name, options))


def noise_of_row(name: str, options: Any) -> NoiseOptions:
    """Parse ``extra_info.tools_kwargs.<name>.noise`` of a row."""
    try:
        return NoiseOptions(**options)
    except (TypeError, ValueError) as problem:
        raise DataError(
            f"the noise of tool '{name}' is not valid: {problem}",
            fix='write {"failure_rate": 0.2, "latency": 0, "seed": 0}',
            where=f"extra_info.tools_kwargs.{name}.noise",
            code="R48",
        ) from problem


_CHARACTERS_PER_TOKEN = 32
"""Characters tokenized per allowed token on either side, so that huge results are not tokenized completely."""


def truncate(text: str, limit: int, side: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Truncate a text to ``limit`` tokens and a mark at one side (``left``, ``middle``, ``right``); say whether it was truncated."""
    reach = limit * _CHARACTERS_PER_TOKEN
    if len(text) <= 2 * reach:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text, False
        head, tail = ids, ids
    else:
        head = tokenizer.encode(text[:reach], add_special_tokens=False)
        tail = tokenizer.encode(text[-reach:], add_special_tokens=False)

    def words(ids: list[int]) -> str:
        return str(tokenizer.decode(ids)).strip("\ufffd")

    if side == "right":
        return f"{words(head[:limit])}...(truncated)", True
    if side == "left":
        return f"(truncated)...{words(tail[-limit:])}", True
    first = (limit + 1) // 2
    last = words(tail[len(tail) - (limit - first) :])
    return f"{words(head[:first])}...(truncated)...{last}", True


log = logging.getLogger("hone.agents.tools")

_MAX_SHOWN_ERRORS = 3


class Toolbox:
    """Collection of all tools of a run, of distinct names."""

    def __init__(self, tools: Sequence[Tool], multi_turn: MultiTurnConfig) -> None:
        self.limits = _CallLimits.from_config(multi_turn)
        self._concurrency = multi_turn.tool_concurrency
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(
                    f"two tools have the name '{tool.name}'",
                    why="a call would be ambiguous",
                    fix="rename or remove one of them",
                    where="actor_rollout_ref.rollout.multi_turn",
                )
            self._tools[tool.name] = tool
        self.audit = AuditLog(multi_turn.audit_dir) if multi_turn.audit_dir is not None else None  # audit log, or None
        self._validators = {name: _validator(tool) for name, tool in self._tools.items()}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def schemas(self, selection: Sequence[str] | None = None) -> list[Schema]:
        """Return the schemas of all tools, or of the selected ones."""
        for name in selection or ():
            if name not in self._tools:
                raise DataError(
                    f"the row selects the tool '{name}', which does not exist",
                    why="the model could not call it",
                    fix=did_you_mean(name, self._tools),
                    where="extra_info.tool_selection",
                    code="R48",
                )
        return [tool.schema for name, tool in self._tools.items() if selection is None or name in selection]

    def session(self, episode: Episode, tokenizer: PreTrainedTokenizerBase) -> ToolSession:
        """Return the tools for one episode; leaving the context releases the states that calls created."""
        return ToolSession(self, episode, tokenizer)

    def invalid(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Describe how the arguments violate the tool's schema; None if they are valid."""
        return _violations(self._validators[name], arguments)

    def gate(self, tool: Tool) -> asyncio.Semaphore:
        """Return the semaphore that limits concurrent calls of a tool."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._gates = loop, {}
        concurrency = tool.concurrency or self._concurrency
        return self._gates.setdefault(tool.name, asyncio.Semaphore(concurrency))

    def close(self) -> None:
        for tool in self._tools.values():
            tool.close()


@dataclass(frozen=True)
class _CallLimits:
    parallel: int
    total: int | None
    timeout: float
    retries: int
    result_tokens: int
    truncated_side: str

    @classmethod
    def from_config(cls, config: MultiTurnConfig) -> _CallLimits:
        return cls(
            config.max_parallel_calls,
            config.max_tool_calls,
            config.tool_timeout,
            config.tool_retries,
            config.max_tool_response_length,
            config.tool_response_truncate_side,
        )


@dataclass
class _Answer:
    status: CallStatus
    text: str
    result: ToolResult | None = None
    attempts: int = 1


class ToolSession:
    """Tools of one episode, whose row selects tools and gives arguments."""

    def __init__(self, toolbox: Toolbox, episode: Episode, tokenizer: PreTrainedTokenizerBase) -> None:
        extra = episode.sample.extra_info
        self.toolbox, self.episode, self._tokenizer = toolbox, episode, tokenizer
        self.schemas = toolbox.schemas(extra.get("tool_selection"))  # schemas in the prompt
        self.exhausted = False  # True after the model was notified that no further call is allowed
        self._limits = toolbox.limits
        self._kwargs: Mapping[str, Mapping[str, Any]] = extra.get("tools_kwargs") or {}
        self._names = [schema["function"]["name"] for schema in self.schemas]
        self._noisy: dict[str, Noisy] = {
            name: with_noise(toolbox[name], self._kwargs[name]["noise"]) for name in self._names_with_noise()
        }
        self._states: dict[str, asyncio.Future[Any]] = {}
        self._executed = 0
        self._stack = AsyncExitStack()
        self._added: dict[str, Tool] = {}
        self._owner = self

    def add(self, tool: Tool) -> None:
        """Add a tool of this episode alone; it replaces one of the run with the same name."""
        self.schemas = [*(schema for schema in self.schemas if schema["function"]["name"] != tool.name), tool.schema]
        self._added[tool.name] = tool
        self._names = [schema["function"]["name"] for schema in self.schemas]

    def shared_with(self, episode: Episode, schemas: Sequence[Schema]) -> ToolSession:
        """Return these tools for a sub-agent, with their states, which this session releases."""
        session = ToolSession(self.toolbox, episode, self._tokenizer)
        session.schemas, session._owner = list(schemas), self._owner  # noqa: SLF001
        session._names = [schema["function"]["name"] for schema in schemas]  # noqa: SLF001
        return session

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Execute the calls of a turn concurrently; return one tool message per call, in order."""
        limits = self._limits
        left = None if limits.total is None else limits.total - self._executed
        allowed = limits.parallel if left is None else min(left, limits.parallel)
        self.exhausted = left is not None and len(calls) > left
        self._executed += min(len(calls), allowed)
        waiting = [self._answer_call(call, number < allowed, allowed) for number, call in enumerate(calls)]
        answered = await self.episode.outside(asyncio.gather(*waiting))
        self.episode.log.calls += [record for record, _ in answered]
        self.episode.reward_turn(sum(record.reward for record, _ in answered))
        return [tool_message(call, content) for call, (_, content) in zip(calls, answered, strict=True)]

    async def _answer_call(
        self, call: ToolCall, permitted: bool, allowed: int
    ) -> tuple[CallRecord, str | list[dict[str, Any]]]:
        """Return the record of a call, and the content of the message that answers it."""
        started, audit = time.perf_counter(), self.toolbox.audit
        audited = self._begin_audit(call) if audit is not None else 0
        if permitted:
            answer = await self._try(call)
        else:
            answer = _Answer(CallStatus.OVER_LIMIT, _over_limit(allowed, self.exhausted))
        result = answer.result or ToolResult("")
        images = self._images(result)
        if images:
            words, left_out = text_of_parts([part for part in result.parts if part["type"] not in IMAGE_PARTS])
            result = dataclasses.replace(result, left_out=left_out)
        else:
            words = answer.text
        text, cut = truncate(
            valid_text(words), self._limits.result_tokens, self._limits.truncated_side, self._tokenizer
        )
        record = CallRecord(
            call.name,
            call.arguments,
            answer.status,
            text,
            self.episode.log.assistant_turns - 1,
            time.perf_counter() - started,
            answer.attempts,
            cut,
            result.reward,
            result.metrics,
            result.left_out,
            started - self.episode.started,
        )
        if audit is not None:
            audit.end(audited, record.status.value, text, record.seconds)
        return record, [{"type": "text", "text": text}, *images] if images else text

    def _begin_audit(self, call: ToolCall) -> int:
        """Record in the audit log that a call begins; return its number there."""
        audit, episode = self.toolbox.audit, self.episode
        assert audit is not None
        arguments = call.raw if call.arguments is None else call.arguments
        turn = episode.log.assistant_turns - 1
        return audit.begin(
            call.name, arguments, episode=episode.name, turn=turn, data_source=episode.sample.data_source
        )

    def _images(self, result: ToolResult) -> list[dict[str, Any]]:
        """Return the images of a result as parts; none if the policy reads no images, or if one of them cannot be read."""
        if self.episode.shown.processor is None:
            return []
        contents = [part_image(part) for part in result.parts if part["type"] in IMAGE_PARTS]
        try:
            images = [read_image(content, "a tool's result") for content in contents if content is not None]
            for image in images:
                image.open()
        except DataError as problem:
            log.warning("the images of a tool's result are left out: %s", problem.what)
            return []
        return [{"type": "image", "image": image} for image in images]

    async def _try(self, call: ToolCall) -> _Answer:
        if call.error is not None or call.arguments is None:
            return _Answer(CallStatus.MALFORMED, f"error: {call.error or 'the arguments are not a JSON object'}")
        if call.name not in self._names:
            there = ", ".join(self._names)
            return _Answer(CallStatus.UNKNOWN_TOOL, f"error: there is no tool '{call.name}'; there are: {there}")
        added = self._added.get(call.name)
        wrong = (
            _violations(_validator(added), call.arguments) if added else self.toolbox.invalid(call.name, call.arguments)
        )
        if wrong is not None:
            return _Answer(CallStatus.INVALID_ARGUMENTS, f"error: {wrong}")
        if added is not None:
            return await self._execute(added, call.arguments)
        tool = self._noisy.get(call.name) or self.toolbox[call.name]
        async with self.toolbox.gate(tool):
            return await self._execute(tool, call.arguments)

    async def _execute(self, tool: Tool, arguments: Mapping[str, Any]) -> _Answer:
        limit = self._limits.timeout if tool.timeout is None else tool.timeout
        tries = 1 + (self._limits.retries if tool.retries is None else tool.retries)
        answer = _Answer(CallStatus.ERROR, "")
        for attempt in range(1, tries + 1):
            try:
                async with asyncio.timeout(limit):
                    state = await self._state(tool)
                    result = ToolResult.from_value(
                        await tool.execute(state, arguments, **self._row_arguments(tool, "execute"))
                    )
                return _Answer(CallStatus.OK, result.text, result, attempt)
            except ToolError as refusal:
                return _Answer(CallStatus.ERROR, f"error: {refusal}", None, attempt)
            except TimeoutError:
                answer = _Answer(CallStatus.TIMEOUT, f"error: no answer within {limit:g} seconds", None, attempt)
            except HoneError:
                raise
            except NoVerdict:  # the tool itself is broken: what the model would do next says nothing about it
                if attempt == tries:
                    raise
            except Exception as error:  # noqa: BLE001 - a tool may raise anything; the model receives the error, and it is counted
                log.debug("tool %s", tool.name, exc_info=error)
                answer = _Answer(CallStatus.ERROR, f"error: {type(error).__name__}: {error}", None, attempt)
        return answer

    async def _state(self, tool: Tool) -> Any:
        """Return the episode's state, created at the first call; concurrent calls wait for the same state."""
        if self._owner is not self:
            return await self._owner._state(tool)  # noqa: SLF001
        future = self._states.get(tool.name)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = self._states[tool.name] = asyncio.ensure_future(self._create(tool))
        return await asyncio.shield(future)

    async def _create(self, tool: Tool) -> Any:
        state = await tool.create(**self._row_arguments(tool, "create"))
        self._stack.push_async_callback(tool.release, state, **self._row_arguments(tool, "release"))
        self._stack.push_async_callback(self._log_reward, tool, state)
        return state

    async def _log_reward(self, tool: Tool, state: Any) -> None:
        reward = await tool.calc_reward(state, **self._row_arguments(tool, "calc_reward"))
        if reward is not None:
            self.episode.log.facts[f"{tool.name}_reward"] = float(reward)

    def _names_with_noise(self) -> list[str]:
        return [name for name in self._names if (self._kwargs.get(name) or {}).get("noise")]

    def _row_arguments(self, tool: Tool, step: str) -> dict[str, Any]:
        return dict((self._kwargs.get(tool.name) or {}).get(f"{step}_kwargs") or {})


def _violations(validator: Any, arguments: Mapping[str, Any]) -> str | None:
    """Describe how arguments violate a schema; None if they are valid."""
    errors = sorted(validator.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
    texts = [
        f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}" for error in errors[:_MAX_SHOWN_ERRORS]
    ]
    return "; ".join(texts) or None


def _over_limit(allowed: int, exhausted: bool) -> str:
    if exhausted:
        return "error: not carried out, no further tool call is allowed; answer now"
    return f"error: not carried out, at most {allowed} calls are allowed at a time; call again"


def _validator(tool: Tool) -> Any:
    import jsonschema.validators  # only here: tools are rare, and not every machine has it

    parameters = tool.schema["function"].get("parameters") or {"type": "object"}
    kind = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ConfigError(
            f"the parameters of tool '{tool.name}' are not a JSON schema: {error.message}",
            fix='write {"type": "object", "properties": {...}, "required": [...]}',
            where=json.dumps(parameters)[:200],
        ) from error
    return kind(parameters)

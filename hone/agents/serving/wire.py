"""Request bodies: bounds on their size, time and values, the threads in which they are processed, and their validation."""

from __future__ import annotations

import asyncio
import ctypes
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from hone.agents.serving.errors import ApiError, bad_request
from hone.errors import did_you_mean
from hone.generation.limits import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MAX_TOP_LOG_PROBS,
    MIN_SEED,
)

LARGE_BYTES = 64 * 2**10
"""Size of a body from which a request is large."""
MAX_HELD_BYTES = 128 * 2**20
"""Maximum of all large bodies in memory; further ones get status 503, to be retried."""
LARGE_BYTES_PER_SECOND = 32 * 2**20
"""Rate at which large bodies arrive, all together. Faster ones would keep the interpreter from the engine's thread."""
TRIM_SECONDS = 0.5
"""Seconds from the end of a large request until its memory goes back to the system."""

P = ParamSpec("P")
Result = TypeVar("Result")


class Workers:
    """Two threads next to the endpoint's event loop, and the memory of large bodies.

    The loop only moves bytes. Whatever takes time in proportion to a request runs here: ordinary requests in one thread, in
    the order of their arrival, and large ones in another, so that they wait for each other and not in front of the ordinary.
    """

    def __init__(self) -> None:
        self._ordinary = ThreadPoolExecutor(1, "hone-requests")
        self._large = ThreadPoolExecutor(1, "hone-large-requests")
        self._turn = asyncio.Lock()
        self._trim_is_due = False
        self.held = 0  # bytes of large bodies in memory

    async def run(self, size: int, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run ``work`` for a request with a body of ``size`` bytes; return its result."""
        loop = asyncio.get_running_loop()
        pool = self._large if size > LARGE_BYTES else self._ordinary
        try:
            return await loop.run_in_executor(pool, lambda: work(*args, **kwargs))
        finally:
            if size > LARGE_BYTES and not self._trim_is_due:
                self._trim_is_due = True
                loop.call_later(TRIM_SECONDS, self._trim)

    @contextmanager
    def holding(self, max_bytes: int) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Yield a function to await with the size of a body as it grows; large bodies arrive at a bounded rate, in turns.

        Raises:
            ApiError: in that function, too many large bodies are in memory.
        """
        counted = arrived = 0

        async def grow(size: int) -> None:
            nonlocal counted, arrived
            if size <= LARGE_BYTES:
                return
            added = min(size, max_bytes) - counted
            if self.held + added > MAX_HELD_BYTES:
                raise ApiError(
                    503,
                    f"large requests of {self.held} bytes are being read, of at most {MAX_HELD_BYTES}; try again later",
                    code="overloaded",
                )
            self.held += added
            counted += added
            async with self._turn:
                await asyncio.sleep((size - arrived) / LARGE_BYTES_PER_SECOND)
            arrived = size

        try:
            yield grow
        finally:
            self.held -= counted

    def _trim(self) -> None:
        self._trim_is_due = False
        self._large.submit(return_free_memory)


def return_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps it for this process otherwise. Other C libraries do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


BYTES_PER_TOKEN = 256
"""Bytes of a request body per token of the context length; text of people has about 4, so this is 64 full contexts."""
MIN_REQUEST_BYTES, MAX_REQUEST_BYTES = 2**20, 32 * 2**20
"""Bounds of the maximum size of a request body."""
BODY_SECONDS = 60.0
"""Time limit for a request body to arrive."""
MAX_VALUES = 2**18
"""Maximum number of values and escapes in a body of JSON; a long prompt of token ids may have more.

Decoding holds the interpreter: a body of 32 MB is decoded in 0.01 s if it is one text, and in 5 s if it is ten million lists.
"""


async def read_body(
    chunks: AsyncIterator[bytes], declared: str | None, grow: Callable[[int], Awaitable[None]], max_bytes: int
) -> bytes:
    """Read a request body. One that is too large is read to its end and dropped, so that the connection can stay open.

    ``declared`` is the header ``Content-Length``. ``grow`` is called with the size so far, before a part is kept.

    Raises:
        ApiError: the body is too large or too slow.
    """
    parts, size = [], 0
    is_kept = declared is None or not declared.isdecimal() or int(declared[:20]) <= max_bytes
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in chunks:
                size += len(part)
                is_kept = is_kept and size <= max_bytes
                if is_kept:
                    parts.append(part)
                else:
                    parts.clear()
                await grow(size)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {BODY_SECONDS:g} s", code="request_timeout") from None
    if not is_kept:
        raise ApiError(413, f"the request has {size} bytes, of at most {max_bytes}", code="request_too_large")
    return b"".join(parts)


def max_request_bytes(max_tokens: int) -> int:
    """Return the maximum size of a request body: text of many prompts for a model of this context length, within bounds."""
    return min(max(BYTES_PER_TOKEN * max_tokens, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)


def check_structure(body: bytes, max_tokens: int) -> None:
    """Check that a body of JSON has few enough values, by counting the characters that begin or separate them.

    A prompt may be as many numbers as the model's context.
    """
    allowed = max(MAX_VALUES, 2 * max_tokens)
    values = sum(body.count(mark) for mark in (b",", b"[", b"{", b"\\"))
    if values > allowed:
        raise bad_request(
            f"the request has about {values} JSON values and escapes, of at most {allowed}; send it in parts, and text as UTF-8",
            code="request_too_large",
        )


MAX_CHOICES = 128
MAX_PROMPT_LOG_PROBS = 128
"""Maximum of likeliest tokens for each token of a prompt."""
MAX_TOKENS = 2**31 - 1
MAX_FIELDS = 100
"""Maximum number of fields of a request; each unknown one would have an error of its own."""
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields about the caller or the provider that do not affect the answer."""

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Objects = Annotated[list[dict[str, Any]], FailFast()]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Token = Annotated[int, Field(ge=0, lt=2**63)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Fields that are null count as missing, in objects of a request too."""
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Strict):
    """``json_schema`` of a :class:`ResponseFormat`. Answers always follow the schema, whether ``strict`` or not."""

    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Strict):
    """``structured_outputs`` of a request, as in vLLM."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ToolName(_Strict):
    name: str


class NamedTool(_Strict):
    """``tool_choice`` of one named tool."""

    type: Literal["function"] = "function"
    function: ToolName


class Body(_Strict):
    """Fields of both kinds of request.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``, ``return_token_ids``,
    ``prompt_logprobs``, ``skip_special_tokens``, ``structured_outputs`` and ``guided_*`` extend OpenAI's fields, with vLLM's names.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] = 1.0
    max_tokens: Count | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOPS), FailFast()] = []
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED - MAX_CHOICES)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS), FailFast()] = []
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[Token, Bias], Field(max_length=MAX_BIASES), FailFast()] = {}
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or []

    @field_validator("stop")
    @classmethod
    def _no_empty(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string is empty")
        return value


class ChatBody(Body):
    """Body of a request to ``/v1/chat/completions``."""

    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] = 0
    tools: Objects = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_log_probs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise ValueError("top_logprobs needs logprobs=true")
        return value

    @property
    def top_log_probs(self) -> int:
        return self.top_logprobs

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of the answer; None uses the remaining context."""
        return self.max_completion_tokens or self.max_tokens


class TextBody(Body):
    """Body of a request to ``/v1/completions``."""

    prompt: str | list[Any]
    """Text, token ids, or a list of such prompts: see :meth:`prompts`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOG_PROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """0 samples nothing, for the log-probs of the prompt."""
    echo: bool = False
    best_of: Literal[1] = 1

    @field_validator("prompt")
    @classmethod
    def _text_or_ids(cls, value: str | list[Any]) -> str | list[Any]:
        if not value:
            raise ValueError("the prompt is empty")
        if isinstance(value, str) or _are_ids(value) or all(isinstance(one, str) or _are_ids(one) for one in value):
            return value
        raise ValueError("a prompt is text or a list of token ids, or a list of these")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids."""
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else self.prompt

    @property
    def top_log_probs(self) -> int:
        """Number of likeliest tokens to report at every position."""
        return self.logprobs or 0

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of the answer; None uses the remaining context."""
        return self.max_tokens


T = TypeVar("T", bound=BaseModel)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def decode(body: bytes) -> Any:
    """Decode a body of JSON.

    Raises:
        ApiError: it is not valid JSON in UTF-8, has a lone surrogate, or is nested too deeply.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the request is not valid JSON: {error}", code="invalid_json") from None


def parse(kind: type[T], fields: Any) -> T:
    """Check a decoded request body.

    Fields that are null count as missing.
    """
    if not isinstance(fields, dict):
        raise bad_request(f"the request must be a JSON object, not a JSON {type(fields).__name__}")
    if len(fields) > MAX_FIELDS:
        raise bad_request(f"the request has {len(fields)} fields, of at most {MAX_FIELDS}")
    present = {
        name: value
        for name, value in fields.items()
        if value is not None and (name in kind.model_fields or name not in WITHOUT_EFFECT)
    }
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _explained(kind, error.errors()[0]) from None


_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 80


def _explained(kind: type[BaseModel], problem: Any) -> ApiError:
    param = ".".join(str(part) for part in problem["loc"])
    top = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return bad_request(
            f"unknown field '{param[:80]}'. {did_you_mean(top, kind.model_fields)}", param[:80], "unknown_parameter"
        )
    if problem["type"] == "missing":
        return bad_request(f"the field '{param}' is missing", param, "missing_required_parameter")
    shown = _short.repr(problem.get("input"))
    supported = " (the API's other values are not supported)" if problem["type"] == "literal_error" else ""
    return bad_request(f"{param}={shown}: {problem['msg']}{supported}", param)

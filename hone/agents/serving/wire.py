"""Request bodies and their validation. Unsupported fields that would change the answer are refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hone.agents.serving.errors import ApiError, bad_request
from hone.errors import did_you_mean

MAX_CHOICES = 128
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

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Zero = Literal[0]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """``stream_options`` of a request."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextOnly(_Strict):
    """``response_format`` of free text, the only one supported."""

    type: Literal["text"] = "text"


class ToolName(_Strict):
    """Function of a :class:`NamedTool`."""

    name: str


class NamedTool(_Strict):
    """``tool_choice`` of one named tool."""

    type: Literal["function"] = "function"
    function: ToolName


class Body(_Strict):
    """Fields of both kinds of request.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos`` and ``return_token_ids`` extend OpenAI's fields, with vLLM's names.
    """

    model: str
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Count | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}

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

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Zero = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    response_format: TextOnly = TextOnly()

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of the answer; None uses the remaining context."""
        return self.max_completion_tokens or self.max_tokens


class TextBody(Body):
    """Body of a request to ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of the answer; None uses the remaining context."""
        return self.max_tokens


T = TypeVar("T", bound=Body)


def parse(kind: type[T], fields: Any) -> T:
    """Check a decoded request body.

    Fields that are null count as missing.

    Raises:
        ApiError: a field is missing, unknown, of the wrong type, out of range or not supported.
    """
    if not isinstance(fields, dict):
        raise bad_request(f"the request must be a JSON object, not a JSON {type(fields).__name__}")
    present = {name: value for name, value in fields.items() if value is not None and name not in WITHOUT_EFFECT}
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _explained(kind, error.errors()[0]) from None


def _explained(kind: type[Body], problem: Any) -> ApiError:
    param = ".".join(str(part) for part in problem["loc"])
    top = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return bad_request(
            f"unknown field '{param}'. {did_you_mean(top, kind.model_fields)}", param, "unknown_parameter"
        )
    if problem["type"] == "missing":
        return bad_request(f"the field '{param}' is missing", param, "missing_required_parameter")
    given = repr(problem.get("input"))
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    supported = " (OpenAI's other values are not supported)" if problem["type"] == "literal_error" else ""
    return bad_request(f"{param}={shown}: {problem['msg']}{supported}", param)

"""What clients may send, checked. What would change the answer and is not supported is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hone.agents.serving.errors import ApiError, bad_request
from hone.errors import did_you_mean

MOST_CHOICES = 128
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that say something about the caller or the provider, and nothing about the answer."""

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
    """``response_format``: free text."""

    type: Literal["text"] = "text"


class ToolName(_Strict):
    """The function of a :class:`NamedTool`."""

    name: str


class NamedTool(_Strict):
    """``tool_choice``: this tool and no other."""

    type: Literal["function"] = "function"
    function: ToolName


class Body(_Strict):
    """What both kinds of request have. ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos`` and
    ``return_token_ids`` go beyond OpenAI's fields, under the names that vLLM gives them."""

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
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
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
    """A request to ``/v1/chat/completions``."""

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
    def longest(self) -> int | None:
        """Most tokens of the answer; None leaves it to the room there is."""
        return self.max_completion_tokens or self.max_tokens


class TextBody(Body):
    """A request to ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    @property
    def longest(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens


T = TypeVar("T", bound=Body)


def parse(kind: type[T], fields: Any) -> T:
    """Check a decoded request body.

    Fields that are null count as not given.

    Raises:
        ApiError: a field is missing, unknown, of the wrong type, out of range or not supported.
    """
    if not isinstance(fields, dict):
        raise bad_request(f"the request is a JSON {type(fields).__name__}, not an object")
    given = {name: value for name, value in fields.items() if value is not None and name not in WITHOUT_EFFECT}
    try:
        return kind.model_validate(given)
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
    supported = " (what OpenAI allows beyond that is not supported)" if problem["type"] == "literal_error" else ""
    return bad_request(f"{param}={shown}: {problem['msg']}{supported}", param)

"""Errors as clients expect them: a status and, for OpenAI's, ``{"error": {message, type, param, code}}``.

Anthropic's expect ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.errors import HoneError


class ApiError(Exception):
    """Error with which a request is answered: an HTTP status, the problem with its fix, a short name for programs, the field."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def with_names(self, names: Mapping[str, str]) -> ApiError:
        """Return the error of a chat with the field names of another endpoint, by those of a chat; its messages have other numbers."""
        top, dot, rest = (self.param or "").partition(".")
        if top == "messages":
            dot = rest = ""
        param = f"{names.get(top, top)}{dot}{rest}" or None
        return ApiError(self.status, self.message, code=self.code, param=param)


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def too_long(size: str, limit: int, param: str = "messages") -> ApiError:
    """Return the error for a prompt of this size that leaves no space for an answer."""
    return ApiError(
        400,
        f"the prompt has {size}; prompt and answer together must fit in {limit} tokens; shorten the prompt",
        code="context_length_exceeded",
        param=param,
    )


OVERLOADED = 529
"""Anthropic's status of an answer for which trying again may help."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
"""Type of an error by its status; others are ``api_error``."""
_TOO_LONG = "prompt is too long"
"""Text by which harnesses recognise that the conversation must be shortened."""


def status_of(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error; its message begins with the invalid field, as Anthropic's form has no other place for it."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = f"{error.param}: {error.message}" if error.param else error.message
    if error.code == "context_length_exceeded":
        message = f"{_TOO_LONG}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_messages_path(path: str) -> bool:
    """Return whether a request to this path is answered in Anthropic's form."""
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


OPTIONS = {
    "actor_rollout_ref.rollout.multi_turn.renderer": "--renderer",
    "actor_rollout_ref.rollout.multi_turn.format": "--parser",
    "actor_rollout_ref.model.custom_chat_template": "--chat-template",
    "model.custom_chat_template": "--chat-template",
}


def named_by_options(error: HoneError) -> HoneError:
    """Return the error with the options of ``hone serve`` where it names keys of a training run."""
    texts = {name: _translated(getattr(error, name)) for name in ("what", "why", "fix", "where")}
    return type(error)(texts["what"], why=texts["why"], fix=texts["fix"], where=texts["where"], code=error.code)


def _translated(text: str) -> str:
    for key, option in OPTIONS.items():
        text = text.replace(f"{key}=", f"{option} ").replace(key, option)
    return text

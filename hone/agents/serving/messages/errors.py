"""Errors as Anthropic's clients expect them: a status and ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

from typing import Any

from hone.agents.serving.errors import ApiError

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

"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: what is wrong, with numbers, and what to do.
        code: short name that programs can look at.
        param: field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


def too_long(prompt: int, limit: int) -> ApiError:
    """A prompt that leaves no room for an answer."""
    return ApiError(
        400,
        f"the prompt has {prompt} tokens, and this model serves at most {limit} with the answer; shorten the messages",
        code="context_length_exceeded",
        param="messages",
    )

"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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

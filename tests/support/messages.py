"""Assert what a message says without pinning its wording: its code, its place, and the names and numbers in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hone.errors import HoneError


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...] = HoneError,
    *mentions: object,
    code: str | None = None,
    where: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of a kind, and check it with :func:`check_message`."""
    with pytest.raises(kind) as caught:
        yield caught
    check_message(caught.value, *mentions, code=code, where=where)


def check_message(error: BaseException, *mentions: object, code: str | None = None, where: str | None = None) -> None:
    """Check an error by code, place, and what its message names.

    Args:
        error: the error, a :class:`HoneError` where code or place is given.
        mentions: numbers, keys, ``key=value`` fixes, names and paths that the message must contain as whole words.
        code: stable identifier, such as R14.
        where: key or file concerned, in full or its beginning.
    """
    if code is not None or where is not None:
        assert isinstance(error, HoneError), f"{type(error).__name__} has neither code nor place: {error}"
        assert code is None or error.code == code, f"code {error.code}, not {code}: {error}"
        assert where is None or error.where.startswith(where), f"place '{error.where}', not '{where}': {error}"
    missing = [str(word) for word in mentions if not mentioned(str(word), str(error))]
    assert not missing, f"the message does not name {missing}: {error}"


def mentioned(word: str, text: str) -> bool:
    """Return whether a text contains a word, number or phrase with no letter or digit adjoining it."""
    start = r"(?<![A-Za-z0-9_])" if word[:1].isalnum() else ""
    end = r"(?![A-Za-z0-9_])" if word[-1:].isalnum() else ""
    return re.search(f"{start}{re.escape(word)}{end}", text) is not None


def one(errors: Iterable[HoneError], code: str) -> HoneError:
    """Return the only error with a code."""
    matching = [error for error in errors if error.code == code]
    assert len(matching) == 1, f"{len(matching)} errors with code {code}"
    return matching[0]

"""Check that prompts and conversations are well-formed: messages, roles, their order, contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hone.data.checks.tally import Problem, Tally
from hone.data.files import Row
from hone.data.messages import check_messages, unwrapped
from hone.errors import DataError, Finding

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython"})
_TOOL_ROLES = frozenset({"tool", "function", "observation", "ipython"})
_FORM = 'write messages as [{"role": "user", "content": "..."}, ...]'

_NO_PROMPT = Problem("R42", "the prompt is null or empty", "the model has nothing to answer", "remove these rows")
_NO_MESSAGES = Problem("R42", "the messages are malformed", "they cannot be rendered", _FORM)
_NO_FORM = Problem(
    "R42",
    "the prompt is neither messages, nor a string, nor token ids",
    "it cannot be tokenized",
    f"{_FORM}, or one string per row",
)
_ROLE = Problem(
    "R42",
    "a message has a role that no chat template supports",
    "it is dropped or refused when the prompt is rendered",
    f"use one of {', '.join(sorted(ROLES - {'observation', 'ipython'}))}",
)
_SYSTEM = Problem(
    "R42",
    "a system message is not the first message",
    "many chat templates refuse it or move it to the front",
    "put it first",
    stops=False,
)
_ANSWERED = Problem(
    "R42",
    "the prompt ends with an assistant message",
    "the model would have to answer its own finished answer",
    "end the prompt with a user or tool message",
    stops=False,
)
_TWO_USERS = Problem(
    "R42",
    "two user messages follow each other",
    "chat templates that require alternating turns refuse them",
    "join them into one message",
    stops=False,
)
_ORPHAN = Problem(
    "R42",
    "a tool message follows no tool call",
    "the model would read a result without a call",
    "put the assistant message with its tool_calls before it",
    stops=False,
)
_EMPTY = Problem(
    "R42", "a user message is empty", "the model has nothing to answer", "fill it in, or remove the row", stops=False
)
_NO_ANSWER = Problem(
    "R42",
    "no assistant message",
    "there is no answer to train on",
    "add the answer as an assistant message, or remove the row",
)
_OPEN_END = Problem(
    "R42",
    "the conversation does not end with an assistant message",
    "messages after the last answer never contribute to the loss",
    "end each row with the answer",
    stops=False,
)


def prompts(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check the prompts in column ``key``: a string, token ids, or messages in a valid order."""
    tally = Tally(len(rows))
    for row in rows:
        value = unwrapped(row.values.get(key))
        if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
            tally.add(row, _NO_PROMPT)
        elif not isinstance(value, str | list):
            tally.add(row, _NO_FORM, f"a {type(value).__name__}")
        elif isinstance(value, list) and not all(type(item) is int for item in value):
            messages = _messages(tally, row, value, key)
            if messages and messages[-1]["role"] == "assistant":
                tally.add(row, _ANSWERED)
    yield from tally.findings()


def conversations(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check the conversations in column ``key``, which need an assistant message."""
    tally = Tally(len(rows))
    for row in rows:
        messages = _messages(tally, row, unwrapped(row.values.get(key)), key)
        if messages and all(message["role"] != "assistant" for message in messages):
            tally.add(row, _NO_ANSWER)
        elif messages and messages[-1]["role"] != "assistant":
            tally.add(row, _OPEN_END)
    yield from tally.findings()


def _messages(tally: Tally, row: Row, value: Any, key: str) -> list[dict[str, Any]]:
    """Return the messages of a row, none if they are malformed, and count their problems."""
    try:
        messages = check_messages(value, where=row.where, column=key)
    except DataError as error:
        tally.add(row, _NO_MESSAGES, error.what)
        return []
    for problem, detail in dict(_problems(messages)).items():
        tally.add(row, problem, detail)
    return messages


def _problems(messages: list[dict[str, Any]]) -> Iterator[tuple[Problem, str]]:
    called = False
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            yield _ROLE, f"message {index} has the role '{role}'"
        if role in ("system", "developer") and index > 0 and messages[index - 1]["role"] not in ("system", "developer"):
            yield _SYSTEM, f"message {index}"
        if role == "user" and index > 0 and messages[index - 1]["role"] == "user":
            yield _TWO_USERS, f"messages {index - 1} and {index}"
        if role == "user" and isinstance(message["content"], str) and not message["content"].strip():
            yield _EMPTY, f"message {index}"
        if role == "assistant":
            called = bool(message.get("tool_calls")) or "call" in str(message["content"]).lower()
        if role in _TOOL_ROLES and not called:
            yield _ORPHAN, f"message {index}"

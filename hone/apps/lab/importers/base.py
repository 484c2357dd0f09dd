"""Common parts of the importers: files, JSON lines, names of prompt groups, conversations."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.data.episode_log import CallRecord, CallStatus, EpisodeLog
from hone.data.images import content_text
from hone.errors import DataError
from hone.text import json_lines, valid_data

Row = dict[str, Any]
"""Values of one sequence by column of the archive, without ``index``; ``step``, ``uid``, ``fate`` and ``text`` are there."""


@dataclass(frozen=True)
class Importer:
    """Importer of one format."""

    name: str
    about: str  # program that writes it, and its files
    # function of a file or folder that returns the files of the format in it, in order of their steps; none if it is
    # not of the format
    files: Callable[[Path], list[Path]]
    read: Callable[[Path], Iterator[Row]]  # function of one of these files that yields its rows


def matching_files(source: Path, pattern: str) -> list[Path]:
    """Return the file if its name matches a glob pattern, or the files below a folder that do, in natural order."""
    if source.is_file():
        return [source] if source.match(pattern) else []
    return sorted((file for file in source.rglob(pattern) if file.is_file()), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key in which numbers count as numbers: ``step_9`` before ``step_10``."""
    parts: list[tuple[int, str]] = []
    for piece in path.parts:
        number = "".join(character for character in piece if character.isdecimal())
        parts.append((int(number) if number else -1, piece))
    return parts


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, or of one JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="save it as UTF-8") from None
    if text.lstrip().startswith("["):
        lines: Sequence[Any] = _parsed(text, path, 1)
    else:
        lines = [_parsed(line, path, number) for number, line in enumerate(json_lines(text), 1) if line.strip()]
    for number, value in enumerate(lines, 1):
        if not isinstance(value, dict):
            raise DataError(f"a {type(value).__name__}, not an object", where=f"{path}, row {number}", fix="remove it")
        yield valid_data(value)


def _parsed(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also too many digits, or nested too deeply
        raise DataError(f"not JSON: {error}", where=f"{path}, line {line}", fix="remove the line") from None


def first_row(path: Path) -> Mapping[str, Any]:
    """Return the first object of a file of JSON lines; empty if there is none."""
    return next(read_json_lines(path), {})


def prompt_uid(prompt: Any) -> str:
    """Return a name for the group of a prompt that has none: equal prompts have equal names, at every step.

    >>> prompt_uid("2 + 2?") == prompt_uid("2 + 2?") != prompt_uid("2 + 3?")
    True
    """
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return f"prompt:{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return numbers, for ``terms``, and other values, for ``extra``; without nulls."""
    numbers = {name: converted for name, value in values.items() if (converted := number(value)) is not None}
    return numbers, {name: value for name, value in values.items() if name not in numbers and value is not None}


def conversation(value: Any) -> tuple[str, list[dict[str, Any]] | None]:
    """Return text and messages of a prompt or completion, which is a string or messages."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
        messages = [openai_message(message) for message in value]
        return "\n".join(content_text(message.get("content")) for message in messages), messages
    return "" if value is None else json.dumps(value, ensure_ascii=False), None


def answer_text(value: Any) -> str:
    """Return the text of the policy in a completion: of messages, those of the assistant."""
    text, messages = conversation(value)
    if messages is None:
        return text
    return "\n".join(content_text(m.get("content")) for m in messages if m.get("role") == "assistant")


def openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI form: tool calls have ``function`` with name and arguments as text; nulls are left out."""
    values = {name: value for name, value in message.items() if value is not None}
    calls = values.get("tool_calls")
    if not calls:
        values.pop("tool_calls", None)
        return values
    values["tool_calls"] = [call if "function" in call else _openai_call(call) for call in calls]
    return values


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": text}}


def episode(messages: Sequence[Mapping[str, Any]], error: str | None = None) -> dict[str, Any] | None:
    """Return the record of an episode from the messages after the prompt; None for one answer without a call."""
    turns = [message for message in messages if message.get("role") == "assistant"]
    if len(messages) < 2 and error is None:
        return None
    results = {
        message.get("tool_call_id"): content_text(message.get("content"))
        for message in messages
        if message.get("role") == "tool"
    }
    calls = [
        CallRecord(
            str(call["function"].get("name")),
            _arguments(call["function"].get("arguments")),
            CallStatus.OK,
            results.get(call.get("id"), ""),
            turn,
        )
        for turn, message in enumerate(turns)
        for call in message.get("tool_calls") or ()
    ]
    log = EpisodeLog(
        messages=[dict(message) for message in messages],
        assistant_turns=len(turns),
        user_turns=sum(message.get("role") == "user" for message in messages),
        calls=calls,
        turn_rewards=[0.0] * len(turns),
        error=error,
    )
    return log.record()


def _arguments(text: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None

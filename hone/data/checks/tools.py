"""Check agents and tools of rows: names that exist, schemas in their place, calls that end, results that fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import token_counts
from hone.data.checks.lengths import MOST_TOKENIZED
from hone.data.checks.tally import Problem, Tally
from hone.data.files import Row
from hone.data.messages import unwrapped
from hone.errors import DataError, Finding, did_you_mean
from hone.text import is_valid

_SCHEMA = Problem(
    "R35",
    "the column tools is not a list of function schemas",
    "the chat template cannot show the tools to the model",
    'write [{"type": "function", "function": {"name": ..., "parameters": {...}}}] or its JSON text',
)
_PASTED = Problem(
    "R36",
    "a message other than the first contains tool schemas",
    "the chat template puts tools into the first system message; elsewhere they are removed or read as conversation",
    "move them into the column tools, or into a first system message",
    stops=False,
)


def agent_names(rows: Sequence[Row], known: Collection[str]) -> Iterator[Finding]:
    """Report names in the column ``agent_name`` that are not agent loops."""
    counts = Counter(row.values["agent_name"] for row in rows if row.values.get("agent_name") is not None)
    for name, count in counts.most_common():
        if name not in known:
            yield Finding(
                DataError(
                    f"agent_name '{name}' ({count} of {len(rows)} rows) is not an agent loop. "
                    f"{did_you_mean(str(name), known)}",
                    why="these rows cannot be played by the loop that they name",
                    fix=f"write one of {', '.join(sorted(known))}, or leave the column out",
                    where="agent_name",
                    code="R48",
                ),
                stops=True,
            )


def tool_names(rows: Sequence[Row], known: Collection[str]) -> Iterator[Finding]:
    """Report tools in ``extra_info.tools_kwargs`` that are neither in ``known`` nor among the row's schemas."""
    tally = Tally(len(rows))
    for row in rows:
        extra = row.values.get("extra_info") or {}
        tools_kwargs = extra.get("tools_kwargs") if isinstance(extra, dict) else None
        row_tools = {name for name, _ in schemas_of_row(row) if name} if tools_kwargs else set()
        for name in sorted(name for name, value in (tools_kwargs or {}).items() if value is not None):
            if name not in row_tools and name not in known:
                problem = Problem(
                    "R48",
                    f"tools_kwargs names the tool '{name}', which is not registered",
                    "it can never be called",
                    f"the known tools are: {', '.join(sorted({*known, *row_tools})) or 'none'}",
                )
                tally.add(row, problem)
    yield from tally.findings()


def tool_schemas(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check the column ``tools``, and report schemas that were pasted into the conversation."""
    tally = Tally(len(rows))
    for row in rows:
        if any(name is None for name, _ in schemas_of_row(row)):
            tally.add(row, _SCHEMA)
        value = unwrapped(row.values.get(key))
        for index, message in enumerate(value if isinstance(value, list) else []):
            content = message.get("content") if isinstance(message, dict) else None
            if index and isinstance(content, str) and '"parameters"' in content and '"function"' in content:
                tally.add(row, _PASTED, f"message {index}")
                break
    yield from tally.findings()


def messages_of(row: Row, key: str) -> list[dict[str, Any]]:
    value = unwrapped(row.values.get(key))
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def schemas_of_row(row: Row) -> list[tuple[str | None, Any]]:
    """Return name and schema of the tools of a row; the name is None without a valid schema."""
    tools = unwrapped(row.values.get("tools"))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            return [(None, tools)]
        if not is_valid(tools):
            return [(None, "JSON with a lone surrogate")]
    if tools is None:
        return []
    named = []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        named.append((name if isinstance(name, str) else None, tool))
    return named


@dataclass
class ToolResultLengths:
    """Lengths of tool results in prompts."""

    results: int
    long: list[int] = field(default_factory=list)  # token lengths of those over the limit, longest first
    where: str = ""  # row of the first of them


def tool_result_lengths(
    rows: Sequence[Row], key: str, tokenizer: PreTrainedTokenizerBase, limit: int
) -> ToolResultLengths:
    """Measure the tool results in the prompts of column ``key`` against ``limit`` tokens.

    A token has at least one byte, so results with at most ``limit`` bytes are not tokenized; of the others, the longest 4000 are.
    """
    results = [
        (row, message["content"])
        for row in rows
        for message in messages_of(row, key)
        if message.get("role") == "tool" and isinstance(message.get("content"), str)
    ]
    candidates = [(row, text) for row, text in results if len(text.encode()) > limit]
    candidates = sorted(candidates, key=lambda pair: -len(pair[1]))[:MOST_TOKENIZED]
    counts = token_counts(tokenizer, [text for _, text in candidates])
    long = [(count, row) for count, (row, _) in zip(counts, candidates, strict=True) if count > limit]
    return ToolResultLengths(
        len(results), sorted((count for count, _ in long), reverse=True), long[0][1].where if long else ""
    )


def tool_turns(rows: Sequence[Row], key: str) -> list[int]:
    """Return the number of calls of each assistant message with tool calls, in the prompts of column ``key``."""
    called = [m.get("tool_calls") for row in rows for m in messages_of(row, key) if m.get("role") == "assistant"]
    return [len(calls) for calls in called if isinstance(calls, list) and calls]

"""Check agents and tools of rows: names that exist, schemas in their place, calls that end, results that fit."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import token_counts
from hone.data.checks.rows import MOST_TOKENIZED, Problem, Tally, problems_of
from hone.data.files import Row
from hone.data.messages import unwrapped
from hone.errors import ConfigError, DataError, Finding, did_you_mean
from hone.text import is_valid

LOOP = 3  # equal calls in succession that are a loop
NO_LIMIT = 10**9  # limit of tool results where none is known
SHORTEST_DESCRIPTION = 12  # characters of a tool's description from which on it says something
PROBLEMS, _ROWS = problems_of("calls"), problems_of("rows")
"""Kinds of defects of calls; and problems of rows."""
GATES = {
    "parse": ("unreadable_arguments",),
    "tool": ("unknown_tool",),
    "schema": ("unreadable_arguments", "unknown_tool", "unfit_arguments"),
}
"""Shares of calls that a gate may demand, by the defects that a call must not have."""


@dataclass(frozen=True)
class Defect:
    """One defect of a row: its kind (of :data:`PROBLEMS`), and the place with details."""

    kind: str
    detail: str


@dataclass
class CallCheck:
    """Result over all rows."""

    rows: int = 0
    calls: int = 0
    bad_calls: Counter[str] = field(default_factory=Counter)  # calls with a defect, by kind
    # defects of every row that has some, by the row's number
    defects: dict[int, list[Defect]] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Return the share of calls without the defects of every gate; 1 without calls."""
        return {
            name: 1 - min(self.calls, sum(self.bad_calls[kind] for kind in kinds)) / max(1, self.calls)
            for name, kinds in GATES.items()
        }

    def numbers(self) -> dict[str, Any]:
        kinds = Counter(
            defect.kind for defects in self.defects.values() for defect in {d.kind: d for d in defects}.values()
        )
        shares = {f"{name}_share": round(share, 4) for name, share in self.shares().items()}
        return {"tool_calls": {"calls": self.calls, **shares, "rows_with_defects": len(self.defects), **kinds}}

    def failed_gates(self, gates: Mapping[str, float]) -> list[str]:
        shares = self.shares()
        return [f"{name} {shares[name]:.4f} < {least:g}" for name, least in gates.items() if shares[name] < least]


def check_calls(
    rows: Sequence[Row], *, messages_key: str, limit: int, pairs: tuple[str, str] = ("chosen", "rejected")
) -> CallCheck:
    """Check the tool calls of all rows.

    Args:
        limit: longest tool result in characters.
        pairs: columns of the better and the worse response.
    """
    check = CallCheck(len(rows))
    for number, row in enumerate(rows):
        defects: list[Defect] = []
        schemas = _by_name(row)
        for key in (messages_key, "prompt", *pairs):
            defects += _conversation(messages_of(row, key), schemas, limit, check)
        defects += _pair(row, pairs)
        defects += [Defect("mute_tool", name) for name, schema in schemas.items() if _is_mute(schema)]
        if defects:
            check.defects[number] = defects
    return check


def call_findings(rows: Sequence[Row], check: CallCheck, *, stops: bool) -> Iterator[Finding]:
    """Yield one finding for each kind of defect; those that make a row unsound stop a run if ``stops``."""
    tally = Tally(len(rows))
    for number, defects in check.defects.items():
        for defect in {defect.kind: defect for defect in reversed(defects)}.values():
            tally.add(rows[number], PROBLEMS[defect.kind], defect.detail)
    for finding in tally.findings():
        yield Finding(finding.error, finding.stops and stops)


def is_unsound(defects: Sequence[Defect]) -> bool:
    return any(PROBLEMS[defect.kind].stops for defect in defects)


def read_gates(text: str | None) -> dict[str, float]:
    """Parse ``parse=0.99,schema=0.99``. Raises ConfigError: a name or a share is invalid."""
    gates: dict[str, float] = {}
    for entry in (text or "").split(",") if text else ():
        name, _, text_of_share = entry.partition("=")
        try:
            share = float(text_of_share)
        except ValueError:
            share = math.nan
        if name.strip() not in GATES or not 0 <= share <= 1:
            raise ConfigError(
                f"'{entry}' is not a gate",
                fix=f"--gate NAME=SHARE with a share from 0 to 1. {did_you_mean(name.strip(), GATES)}",
                where="--gate",
            )
        gates[name.strip()] = share
    return gates


def _conversation(
    messages: Sequence[Mapping[str, Any]], schemas: Mapping[str, Any], limit: int, check: CallCheck
) -> Iterator[Defect]:
    open_calls: dict[str, str] = {}
    previous, repeated = None, 1
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            yield from _result(index, message, open_calls, limit)
            continue
        if open_calls and message.get("role") != "system":
            yield Defect("call_without_result", f"message {index} follows {', '.join(open_calls.values())}")
            open_calls = {}
        calls = message.get("tool_calls") or []
        for place, call in enumerate(calls if isinstance(calls, list) else []):
            check.calls += 1
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            name = str(function.get("name"))
            open_calls[
                str(call.get("id") or f"{index}.{place}") if isinstance(call, Mapping) else f"{index}.{place}"
            ] = name
            for kind, detail in _call(name, function.get("arguments"), schemas):
                check.bad_calls[kind] += 1
                yield Defect(kind, f"message {index}: {detail}")
        shown = json.dumps([_without_id(call) for call in calls], sort_keys=True, default=str) if calls else None
        repeated = repeated + 1 if shown is not None and shown == previous else 1
        previous = shown if shown is not None or message.get("role") == "user" else previous
        if repeated == LOOP:
            yield Defect("loop", f"message {index}")


def _result(index: int, message: Mapping[str, Any], open_calls: dict[str, str], limit: int) -> Iterator[Defect]:
    """Check a tool message, and close the call that it answers."""
    identity, name = message.get("tool_call_id"), message.get("name")
    if identity is not None and str(identity) in open_calls:
        del open_calls[str(identity)]
    elif identity is None and open_calls:
        del open_calls[next((key for key, called in open_calls.items() if called == name), next(iter(open_calls)))]
    else:
        yield Defect("result_without_call", f"message {index}" + (f", tool_call_id {identity}" if identity else ""))
    length = len(str(message.get("content") or ""))
    if length > limit:
        yield Defect("long_result", f"message {index}: {length} characters")


def _call(name: str, arguments: Any, schemas: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the defects of one call: at most one kind, the first in the order of :data:`GATES`."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            yield "unreadable_arguments", f"{name}: {error}"
            return
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        yield "unreadable_arguments", f"{name}: a {type(arguments).__name__}"
        return
    if not schemas:
        return
    if name not in schemas:
        yield "unknown_tool", f"{name}; the row has {', '.join(schemas)}"
        return
    parameters = schemas[name].get("parameters") or {"type": "object"}
    present = {
        key: value for key, value in arguments.items() if value is not None
    }  # parquet fills absent keys with null
    error = next(iter(_validator(json.dumps(parameters, sort_keys=True, default=str)).iter_errors(present)), None)
    if error is not None:
        yield "unfit_arguments", f"{name}: {error.message[:160]}"


def _pair(row: Row, keys: tuple[str, str]) -> Iterator[Defect]:
    """Compare the messages before the first answer of two whole conversations."""
    before = []
    for key in keys:
        messages = messages_of(row, key)
        roles = [message.get("role") for message in messages]
        if "assistant" not in roles or roles[0] == "assistant":
            return
        first = roles.index("assistant")
        before.append([(m.get("role"), m.get("content")) for m in messages[:first]])
    if before[0] != before[1]:
        yield Defect("different_prompts", f"{len(before[0])} and {len(before[1])} messages before the first answer")


def _by_name(row: Row) -> dict[str, Any]:
    named = {}
    for name, tool in schemas_of_row(row):
        if name is not None:
            named[name] = tool.get("function", tool)
    return named


def _is_mute(schema: Mapping[str, Any]) -> bool:
    return len(str(schema.get("description") or "").strip()) < SHORTEST_DESCRIPTION


def _without_id(call: Any) -> Any:
    return {name: part for name, part in call.items() if name != "id"} if isinstance(call, Mapping) else call


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    import jsonschema.validators

    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    return kind(parsed)


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
            tally.add(row, _ROWS["schema"])
        value = unwrapped(row.values.get(key))
        for index, message in enumerate(value if isinstance(value, list) else []):
            content = message.get("content") if isinstance(message, dict) else None
            if index and isinstance(content, str) and '"parameters"' in content and '"function"' in content:
                tally.add(row, _ROWS["pasted"], f"message {index}")
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

"""Constraint on an answer: a response format, or a tool call that ``tool_choice`` requires.

A required call in the Hermes format is prefilled up to the part that the model chooses, which a grammar then holds to the tool's
schema. Where the prompt opens a reasoning block, the grammar begins with reasoning instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.parsers.formats import HermesParser, Llama3JsonParser
from hone.agents.rendering import Renderer
from hone.agents.serving.errors import bad_request
from hone.agents.serving.wire import Body, ChatBody, NamedTool
from hone.data.chat import named_tokens
from hone.errors import RequestError
from hone.generation.grammars import expression_of, json_expression
from hone.generation.protocol import Constraint, ConstraintKind

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")
"""Keywords of an object's schema by which it may have more properties than ``properties`` names."""


@dataclass(frozen=True)
class ForcedAnswer:
    """Beginning of an answer, and the constraint on the rest."""

    # tokens appended to the prompt. They are not sampled: they have no log-probs and are excluded from the loss mask.
    ids: list[int]
    constraint: Constraint | None  # on the answer after them


def constraint_of(body: Body) -> Constraint | None:
    """Return the constraint that a request's fields name; None if the answer is free.

    Raises:
        ApiError: there are several, or a JSON schema is missing.
    """
    form, outputs = body.response_format, body.structured_outputs
    if form.type == "json_schema" and form.json_schema is None:
        raise bad_request("response_format has no json_schema", "response_format.json_schema")
    schema, is_object = ConstraintKind.JSON_SCHEMA, form.type == "json_object"
    named: dict[str, Constraint | None] = {
        "response_format": Constraint(ConstraintKind.JSON_OBJECT)
        if is_object
        else _constraint(schema, form.json_schema and form.json_schema.schema_),
        "guided_json": _constraint(schema, body.guided_json),
        "guided_regex": _constraint(ConstraintKind.REGEX, body.guided_regex),
        "guided_choice": _constraint(ConstraintKind.CHOICE, body.guided_choice),
        "guided_grammar": _constraint(ConstraintKind.GRAMMAR, body.guided_grammar),
        "structured_outputs.json": _constraint(schema, outputs.json_),
        "structured_outputs.regex": _constraint(ConstraintKind.REGEX, outputs.regex),
        "structured_outputs.choice": _constraint(ConstraintKind.CHOICE, outputs.choice),
        "structured_outputs.grammar": _constraint(ConstraintKind.GRAMMAR, outputs.grammar),
        "structured_outputs.json_object": Constraint(ConstraintKind.JSON_OBJECT) if outputs.json_object else None,
    }
    given = {name: constraint for name, constraint in named.items() if constraint is not None}
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} are given, but an answer has one constraint", list(given)[1])
    return next(iter(given.values()), None)


def forced_answer(renderer: Renderer, body: ChatBody, prompt_ids: Sequence[int]) -> ForcedAnswer:
    """Return what the answer to a chat is held to.

    Raises:
        ApiError: the tool is unknown, the model's format of calls has no grammar, or the constraint cannot be combined with the
            rest of the request.
    """
    constraint = constraint_of(body)
    thinks = renderer.is_thinking(prompt_ids)
    if body.tool_choice in ("auto", "none"):
        may_call = bool(body.tools) and body.tool_choice == "auto"
        if constraint is None or not (thinks or may_call):
            return ForcedAnswer([], constraint)
        rules = ["answer: " + _expression(constraint)]
        if may_call:
            calls = _calls_of(renderer, body, body.tools)
            rules = [*rules, *calls.rules("calls", prefilled=False)]
        return ForcedAnswer([], _grammar(renderer, "(answer | calls)" if may_call else "answer", rules, thinks=thinks))
    if constraint is not None:
        raise bad_request("tool_choice requires a call, so the answer cannot have a response format too", "tool_choice")
    calls = _calls_of(renderer, body, _chosen_tools(body))
    ids: list[int] = []
    if not thinks and calls.prefill:
        encoded: Any = renderer.tokenizer(calls.prefill, add_special_tokens=False)
        ids = list(encoded["input_ids"])
    return ForcedAnswer(ids, _grammar(renderer, "calls", calls.rules("calls", prefilled=bool(ids)), thinks=thinks))


@dataclass(frozen=True)
class _Calls:
    """Grammar of tool calls in a model's format."""

    opening: str  # expressions around each call
    closing: str
    separator: str  # expression between two calls
    key: str  # name of the arguments in a call
    tools: dict[str, Any]  # names and schemas
    is_named: bool  # whether the one tool was chosen by name
    several: bool  # whether the answer may have several calls
    prefill: str = ""  # text with which the answer begins

    def rules(self, name: str, *, prefilled: bool) -> list[str]:
        """Return the rules of Lark for one or more calls, the first one without its prefilled beginning."""
        bodies = [f"tool_{index}" for index in range(len(self.tools))]
        opening, more = f"{self.opening} " if self.opening else "", ""
        if self.several:
            more = f" ({_text(self.separator)} call)*"
        first = "call"
        if prefilled:
            first = f"arguments_0 {_text('}')} {self.closing}" if self.is_named else f"body {self.closing}"
        rules = [f"{name}: {first}{more}", f"call: {opening}body {self.closing}", f"body: {' | '.join(bodies)}"]
        for index, (tool, schema) in enumerate(self.tools.items()):
            head = _text(f'{{"name": {json.dumps(tool)}, "{self.key}":')
            rules.append(f"tool_{index}: {head} arguments_{index} {_text('}')}")
            rules.append(f'arguments_{index}: " " object_{index}')
            rules.append(f"object_{index}: {json_expression(schema)}")
        return rules


def _calls_of(renderer: Renderer, body: ChatBody, tools: Sequence[dict[str, Any]]) -> _Calls:
    schemas = {_name(tool): _parameters(tool) for tool in tools}
    is_named = isinstance(body.tool_choice, NamedTool)
    several = body.parallel_tool_calls and not is_named
    if isinstance(renderer.parser, HermesParser):
        opening, closing = HermesParser.marks
        prefill = f"{opening}\n"
        if is_named:
            prefill += f'{{"name": {json.dumps(next(iter(schemas)))}, "arguments":'
        before, after = f'{_mark(renderer, opening)} "\\n"', f'"\\n" {_mark(renderer, closing)}'
        return _Calls(before, after, "\n", "arguments", schemas, is_named, several, prefill)
    if isinstance(renderer.parser, Llama3JsonParser):
        return _Calls("", "", "; ", "parameters", schemas, is_named, several)
    raise bad_request(
        "this model's format of tool calls has no grammar: tool_choice must be auto or none, and an answer with tools has no "
        "response format",
        "tool_choice",
    )


def _chosen_tools(body: ChatBody) -> list[dict[str, Any]]:
    names = [_name(tool) for tool in body.tools]
    if not names:
        raise bad_request("tool_choice requires a call, but 'tools' is empty", "tool_choice")
    if not isinstance(body.tool_choice, NamedTool):
        return body.tools
    chosen = body.tool_choice.function.name
    if chosen not in names:
        raise bad_request(f"tool '{chosen}' does not exist; tools: {', '.join(names)}", "tool_choice")
    return [tool for tool in body.tools if _name(tool) == chosen]


def _grammar(renderer: Renderer, answer: str, rules: Sequence[str], *, thinks: bool) -> Constraint:
    """Return the grammar of an answer, after the end of reasoning if the prompt begins it."""
    start = f"start: {answer}"
    if thinks:
        start = f'start: thoughts {_mark(renderer, renderer.parser.thoughts[1])} "\\n"* {answer}'
        rules = [*rules, "thoughts: /(.|\\n)*/"]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join([start, *rules]))


def _expression(constraint: Constraint) -> str:
    try:
        return expression_of(constraint)
    except RequestError as error:
        raise bad_request(f"{error.what}; {error.fix}", error.field) from error


def _mark(renderer: Renderer, mark: str) -> str:
    """Return a mark as an expression: its token, or its text if it has no token."""
    token = named_tokens(renderer.tokenizer).get(mark)
    return _text(mark) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text)


def _constraint(kind: ConstraintKind, value: Any) -> Constraint | None:
    if value is None:
        return None
    return Constraint(kind, value if isinstance(value, str) else json.dumps(value))


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which have no other properties than it names unless it says so."""
    parameters = tool.get("function", tool).get("parameters") or {}
    if not isinstance(parameters, dict):
        raise bad_request(f"the parameters of tool '{_name(tool)}' are no JSON schema", "tools")
    schema = {"type": "object", "properties": {}, **parameters}
    return schema if any(key in schema for key in _COMBINED) else {**schema, "additionalProperties": False}


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))

"""Constraints on responses as text: their form and size. :mod:`hone.generation.grammars` compiles them."""

from __future__ import annotations

import json
from typing import Any

from hone.errors import RequestError
from hone.generation.protocol import Constraint, ConstraintKind
from hone.text import is_valid

MAX_CONSTRAINT_CHARACTERS = 2**18
"""Maximum of characters in a constraint: llguidance compiles as many in 0.2 s."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Whitespace of constrained JSON: at most one space after a comma or colon. A policy could repeat flexible whitespace without end."""


def check_constraint(constraint: Constraint) -> None:
    """Check the size and form of a constraint. Whether it compiles is known only after compilation.

    Raises:
        RequestError: it is too large or not of its kind's form.
    """
    text = constraint.text
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise refused_constraint(
            constraint, f"has {len(text)} characters", f"at most {MAX_CONSTRAINT_CHARACTERS} characters"
        )
    if not is_valid(text):
        raise refused_constraint(constraint, "has a lone surrogate, which cannot be encoded", "valid text")
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema_of(constraint)
    elif constraint.kind is ConstraintKind.CHOICE:
        choices_of(constraint)


def schema_of(constraint: Constraint) -> Any:
    """Return the schema of a constraint of kind ``json_schema``.

    Raises:
        RequestError: it is not a JSON schema.
    """
    schema = _decoded(constraint)
    if not isinstance(schema, dict | bool) or (isinstance(schema, dict) and not isinstance(_options(schema), dict)):
        raise refused_constraint(constraint, "is not a JSON schema, which is an object", 'a schema: {"type": ...}')
    return schema


def choices_of(constraint: Constraint) -> list[str]:
    """Return the strings of a constraint of kind ``choice``.

    Raises:
        RequestError: it is not a JSON list of strings, or has no text to choose.
    """
    choices = _decoded(constraint)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise refused_constraint(
            constraint, "is not a list of strings with at least one character", 'a JSON list such as ["yes", "no"]'
        )
    return choices


def with_compact_whitespace(schema: Any) -> Any:
    """Return a JSON schema with :data:`COMPACT` whitespace; its own ``x-guidance`` wins."""
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    return {**schema, "x-guidance": {**COMPACT, **_options(schema)}}


def refused_constraint(constraint: Constraint, problem: str, fix: str) -> RequestError:
    """Return the error for a constraint that cannot be served."""
    return RequestError(
        f"the constraint of kind {constraint.kind} {problem}",
        why="the response could not be held to it",
        fix=fix,
        field="constraint",
    )


def _options(schema: dict[str, Any]) -> Any:
    return schema.get("x-guidance") or {}


def _decoded(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise refused_constraint(constraint, f"is not JSON: {error}", "valid JSON, nested little") from None

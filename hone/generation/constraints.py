"""Constraints on responses as text: their form and size. :mod:`hone.generation.grammars` compiles them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.config.rollout import ConstraintConfig
from hone.errors import ConfigError, RequestError, did_you_mean
from hone.generation.protocol import Constraint, ConstraintKind
from hone.text import is_valid

MAX_CONSTRAINT_CHARACTERS = 2**18
"""Maximum of characters in a constraint: llguidance compiles as many in 0.2 s."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Whitespace of constrained JSON: at most one space after a comma or colon. A policy could repeat flexible whitespace without end."""


def configured_constraint(keys: ConstraintConfig) -> Constraint | None:
    """Return the constraint of a configuration; None if it has none.

    Raises:
        ConfigError: it has no text or two, the file cannot be read, or the text is not of its kind's form.
    """
    where = "actor_rollout_ref.rollout.constraint"
    if keys.kind is None:
        if keys.text is not None or keys.file is not None:
            raise ConfigError(
                "rollout.constraint has a text or file, but no kind",
                why="responses would be free",
                fix=f"{where}.kind=json_schema, or another kind",
                where=f"{where}.kind",
            )
        return None
    needs_text = keys.kind != ConstraintKind.JSON_OBJECT
    if (keys.text is not None) + (keys.file is not None) != needs_text:
        raise ConfigError(
            f"rollout.constraint.kind={keys.kind} with text={keys.text!r} and file={keys.file!r}",
            why="a constraint has one text" if needs_text else "any JSON object is allowed, so a text has no effect",
            fix=f"one of {where}.text and {where}.file" if needs_text else f"{where}.text=null {where}.file=null",
            where=where,
        )
    return _checked(keys.kind, _file_text(keys.file) if keys.file is not None else keys.text or "", where)


def constraint_option(option: str | None) -> Constraint | None:
    """Return the constraint in an option of a command: ``KIND=TEXT``, ``KIND=@FILE``, or ``json_object``; None without one."""
    if not option:
        return None
    kind, _, text = option.partition("=")
    if kind not in list(ConstraintKind):
        raise ConfigError(
            f"'{kind}' is not a kind of constraint", fix=did_you_mean(kind, list(ConstraintKind)), where="--constraint"
        )
    return _checked(kind, _file_text(text[1:]) if text.startswith("@") else text, "--constraint")


def _checked(kind: str, text: str, where: str) -> Constraint:
    constraint = Constraint(ConstraintKind(kind), text)
    try:
        check_constraint(constraint)
    except RequestError as error:
        raise ConfigError(error.what, why=error.why, fix=error.fix, where=where) from error
    return constraint


def _file_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the file '{name}' of the constraint cannot be read: {error}",
            why="responses could not be held to it",
            fix="the path of a text file in UTF-8",
            where=name,
        ) from error


def check_constraint(constraint: Constraint) -> None:
    """Check the size and form of a constraint. Whether it compiles is known only after compilation."""
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

"""Scorer of JSON answers by a JSON schema."""

from __future__ import annotations

import json
import re
from typing import Any

from hone.data.answers import tagged_answer
from hone.rewards.scorers.base import graded, register_scorer

MAX_CHARACTERS = 100_000  # maximum length of JSON text in characters
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@register_scorer("json_schema", "json_schema", "json", may_hang=True)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    schema: dict[str, Any] | None = None,
    valid_score: float = 0.2,
) -> dict[str, Any]:
    """Score 1 for JSON that fits the schema, ``valid_score`` for other JSON, 0 for none.

    The JSON is the whole response, in the last fenced block, or in the last ``<answer>...</answer>``.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the JSON schema, as a dict or as text, unless ``schema`` is given.
        extra_info: not used.
        schema: JSON schema for all rows.
        valid_score: reward of JSON that does not fit.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    required = schema if schema is not None else ground_truth
    required = json.loads(required) if isinstance(required, str) else required
    try:
        checker = validator_for(required)
        checker.check_schema(required)
    except SchemaError as error:
        raise ValueError(f"the schema is not a JSON schema: {error.message}") from None
    has_json, value = find_json(solution_str)
    problem = next((error.message for error in checker(required).iter_errors(value)), None) if has_json else "no JSON"
    score = 1.0 if problem is None else valid_score if has_json else 0.0
    return graded(score, right=problem is None, marked=has_json, pred=value) | {"fault": problem and problem[:200]}


def find_json(text: str) -> tuple[bool, Any]:
    """Return whether a response has JSON, and its value."""
    fenced = _FENCE.findall(text[-MAX_CHARACTERS:])
    for candidate in (text.strip(), *fenced[-1:], tagged_answer(text) or ""):
        if candidate and len(candidate) <= MAX_CHARACTERS:
            try:
                return True, json.loads(candidate, parse_constant=_refused)
            except (ValueError, RecursionError):
                continue
    return False, None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

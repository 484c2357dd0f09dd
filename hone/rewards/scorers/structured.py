"""Answers that are JSON: does the response hold it, and does it fit a schema."""

from __future__ import annotations

import json
import re
from typing import Any

from hone.rewards.scorers.base import register_scorer, tagged_answer

LONGEST = 100_000
"""Longest JSON text that is read, in characters."""
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
    """1 for JSON that fits the schema, ``valid_score`` for other JSON, 0 for none.

    The JSON is the whole response, stands in the last fenced block, or in the last ``<answer>...</answer>``.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the JSON schema, as a dict or as text, unless ``schema`` is given.
        extra_info: not used.
        schema: the schema for all rows.
        valid_score: reward of JSON that does not fit.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    wanted = schema if schema is not None else ground_truth
    wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    try:
        checker = validator_for(wanted)
        checker.check_schema(wanted)
    except SchemaError as error:
        raise ValueError(f"the schema is none: {error.message}") from None
    found, value = read(solution_str)
    fault = next((error.message for error in checker(wanted).iter_errors(value)), None) if found else "no JSON"
    return {
        "score": 1.0 if fault is None else valid_score if found else 0.0,
        "acc": float(fault is None),
        "format": float(found),
        "pred": value,
        "fault": fault and fault[:200],
    }


def read(text: str) -> tuple[bool, Any]:
    """Whether a response holds JSON, and its value."""
    fenced = _FENCE.findall(text[-LONGEST:])
    for candidate in (text.strip(), *fenced[-1:], tagged_answer(text) or ""):
        if candidate and len(candidate) <= LONGEST:
            try:
                return True, json.loads(candidate, parse_constant=_refused)
            except (ValueError, RecursionError):
                continue
    return False, None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")

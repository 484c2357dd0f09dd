"""The text of a teacher's prompt: a template with fields of the dataset row."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from hone.data.types import Sample
from hone.errors import DataError

KEY = "distillation.teacher_prompt"


def fields_of(template: str) -> list[str]:
    """Return the names of the fields in braces, without what follows a dot or a bracket.

    Raises ValueError: the braces do not match.
    """
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return [name.partition(".")[0].partition("[")[0] for name in names]


def fields_of_row(prompt: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a template may name."""
    solution = {} if ground_truth is None else {"ground_truth": ground_truth}
    return {**extra_info, **solution, "prompt": prompt}


def filled(template: str, sample: Sample, prompt: str) -> str:
    """Return the text of a teacher's prompt for a row whose own text is ``prompt``.

    Raises DataError: the row lacks a field, or the braces of the text do not match.
    """
    fields = fields_of_row(prompt, sample.ground_truth, sample.extra_info)
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as problem:
        raise DataError(
            f"row {sample.uid} cannot fill in the teacher's prompt: {type(problem).__name__} {problem}",
            why=f"fields in braces are {', '.join(sorted(fields))}; a brace itself is written twice",
            fix=f"{KEY}=<a text with fields that every row has>",
            where=KEY,
        ) from problem

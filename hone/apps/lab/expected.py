"""The expected answer as a pattern of text: whether an answer has it near its end, whatever the reward made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TAIL = 240
"""Characters at the end of an answer in which the expected one is looked for."""
_LONG = 100
"""Most characters of an expected answer that is looked for."""


def expected_pattern(expected: Any) -> re.Pattern[str] | None:
    """Return the pattern of an expected answer as a word; None for one that cannot be looked for."""
    if isinstance(expected, Mapping):
        expected = next((expected[name] for name in ("answer", "target", "ground_truth") if name in expected), None)
    if isinstance(expected, list) and len(expected) == 1:
        expected = expected[0]
    if isinstance(expected, bool) or not isinstance(expected, (str, int, float)):
        return None
    text = str(expected).strip()
    if not text or len(text) > _LONG:
        return None
    return re.compile(rf"(?<![\w.,-]){re.escape(text)}(?![\w]|[.,]\d)")

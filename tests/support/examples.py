"""How many examples a property is tried with: all that its test states with `scripts/test --all`, as CI does, else half of them.

They are drawn anew in every run, so what one run misses another finds.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

ALL_VARIABLE = "HONE_TEST_ALL"
"""Environment variable that `scripts/test --all` sets."""
USUAL = 100
"""Of a property that does not state a number."""


def examples(count: int = USUAL, **more: Any) -> settings:
    """Settings with ``count`` examples, or half of them; ``more`` as in hypothesis.settings."""
    return settings(max_examples=count if os.environ.get(ALL_VARIABLE) else -(-count // 2), deadline=None, **more)

"""How many examples a property test tries, and whether they are the same in every run.

By default examples are derandomised: a test tries the same ones in every run, so a failure repeats. `scripts/test --random`
draws new ones from a seed that it prints; HONE_TEST_SEED=<seed> draws them again. `scripts/test --all` tries every
example that a test states, `scripts/test --unit` an eighth, other runs a quarter of them.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

ALL_VARIABLE = "HONE_TEST_ALL"
"""Environment variable that `scripts/test --all` sets."""
UNIT_VARIABLE = "HONE_TEST_UNIT"
"""Environment variable that `scripts/test --unit` sets."""
SEED_VARIABLE = "HONE_TEST_SEED"
"""Environment variable that `scripts/test --random` sets: seed of the drawn examples."""
USUAL = 100
"""Examples of a property that states no number."""


def examples(count: int = USUAL, **more: Any) -> settings:
    """Return settings with ``count`` examples or a share of them; ``more`` as in hypothesis.settings."""
    share = 1 if os.environ.get(ALL_VARIABLE) else 8 if os.environ.get(UNIT_VARIABLE) else 4
    wanted = -(-count // share)
    random = os.environ.get(SEED_VARIABLE) is not None
    storage = {} if random else {"database": None}
    return settings(max_examples=wanted, deadline=None, derandomize=not random, **storage, **more)

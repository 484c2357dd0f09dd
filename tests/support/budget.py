"""Which fast tests may take more than a second of processor: those of tests/slow_tests.toml, which says why."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "slow_tests.toml"
SECOND = 1.0
MARGIN = 2.0
"""How much longer a test may take on a busy machine, or where it is the first to import something, before it is named."""


def reasons() -> dict[str, str]:
    """Return why tests take longer than :data:`SECOND`, by file and function."""
    return {
        f"{file}::{name}": why for file, tests in tomllib.loads(FILE.read_text()).items() for name, why in tests.items()
    }


def unlisted(seconds: Mapping[str, float]) -> list[str]:
    """Return a line for each test over the budget that no reason is given for.

    Args:
        seconds: of processor, by id of a fast test.
    """
    known = reasons()
    over = {
        name: taken
        for name, taken in seconds.items()
        if taken > SECOND * MARGIN and name.partition("[")[0] not in known
    }
    return [f"{taken:.1f} s  {name}" for name, taken in sorted(over.items(), key=lambda entry: -entry[1])]

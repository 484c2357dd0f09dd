"""The sandbox's backends that work here, and limits that attacks on them meet."""

from __future__ import annotations

import pytest
from support.patience import SOON

from hone.rewards.sandbox import Limits
from hone.rewards.sandbox.runner import available

WORKING, MISSING = available()
LIMITS = Limits(seconds=SOON, memory_mb=256, processes=16, disk_mb=16, files=2000)
EVERY = [
    pytest.param(name, marks=pytest.mark.skipif(name not in WORKING, reason=f"no {name}: {MISSING.get(name)}"), id=name)
    for name in ("bubblewrap", "user", "process")
]

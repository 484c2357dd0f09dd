"""Derive every random draw of a run from its purpose, never from its time.

A draw is named by (run seed, purpose, step, sample uid, index). A resumed run, a run with another batch order and a run on
other workers therefore draw the same numbers.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed for the draw named by ``parts``, e.g. ``derive_seed(run_seed, "rollout", step, uid, index)``."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

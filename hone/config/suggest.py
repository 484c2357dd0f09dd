"""Suggestions of keys for an unknown key."""

from __future__ import annotations

import difflib
import re

from hone.config.keys import KeyDoc, blocks, documentation
from hone.errors import ConfigError

_NEAR = 0.55
_WORSE = 0.2  # largest difference in score from the best suggestion


def nearest_keys(key: str, cls: type, *, limit: int = 3) -> list[KeyDoc]:
    """Return the leaves of the tree ``cls`` that are most similar to ``key``, best first.

    The score of a key depends on the spelling of its last part, on the words of ``key`` in its documentation
    ("group_size" matches the key documented as "the group size"), and on the whole path.
    """
    scored = sorted((_nearness(key, candidate), candidate.path, candidate) for candidate in documentation(cls))
    bar = max(_NEAR, scored[-1][0] - _WORSE)
    return [candidate for score, _, candidate in scored[::-1] if score >= bar][:limit]


def unknown_key(key: str, cls: type, *, origin: str = "") -> ConfigError:
    """Return the error for a key that the tree ``cls`` does not have; ``origin`` is where it was written."""
    near = nearest_keys(key, cls)
    inside = next((leaf for leaf in documentation(cls) if key.startswith(f"{leaf.path}.")), None)
    siblings = [leaf for leaf in documentation(cls) if leaf.path.rpartition(".")[0] == key.rpartition(".")[0]]
    same_name = any(leaf.last == key.rpartition(".")[2] for leaf in near)
    block = difflib.get_close_matches(key, blocks(cls), n=1, cutoff=0.8)
    if block and not same_name:
        fix = f"Did you mean the block {block[0]}?"
    elif inside:
        fix = f"{inside.path} is a value, not a block: {inside.path}=..."
    elif near:
        width = max(len(candidate.path) for candidate in near)
        fix = "Did you mean\n" + "\n".join(f"    {c.path:<{width}}  {c.meaning}" for c in near)
    elif siblings:
        fix = f"keys of this block: {', '.join(leaf.last for leaf in siblings)}"
    else:
        fix = "`hone config show` prints all keys"
    return ConfigError(
        f"unknown key {key}" + (f" ({origin})" if origin else ""),
        why="it would have no effect",
        fix=fix,
        code="R09",
    )


def _nearness(key: str, candidate: KeyDoc) -> float:
    last = key.rpartition(".")[2]
    spelling = difflib.SequenceMatcher(None, last, candidate.last).ratio()
    whole = difflib.SequenceMatcher(None, key, candidate.path).ratio()
    return 0.75 * max(spelling, 0.9 * _shared_words(last, candidate)) + 0.25 * whole


def _shared_words(last: str, candidate: KeyDoc) -> float:
    wanted = set(re.findall(r"[a-z0-9]{2,}", last.lower()))
    offered = set(re.findall(r"[a-z0-9]+", f"{candidate.path} {candidate.doc}".lower()))
    shared = [word for word in wanted if word in offered or difflib.get_close_matches(word, offered, n=1, cutoff=0.85)]
    return len(shared) / len(wanted) if wanted else 0.0

"""Shorter names of keys on the command line."""

from __future__ import annotations

from hone.config.tree import RLConfig

BLOCKS: dict[type, dict[str, str]] = {RLConfig: {"model": "actor_rollout_ref.model"}}
"""Block of each short name, by tree: ``hone train model.path=DIR`` is the policy's model, as in the other commands."""


def full_key(key: str, schema: type) -> str:
    """Return the key that a name means; any other name unchanged.

    >>> full_key("model.path", RLConfig)
    'actor_rollout_ref.model.path'
    """
    block, dot, rest = key.partition(".")
    return f"{BLOCKS[schema][block]}.{rest}" if dot and block in BLOCKS.get(schema, {}) else key

"""Shorter names of keys on the command line."""

from __future__ import annotations

from hone.config.tree import RLConfig

BLOCKS: dict[type, dict[str, str]] = {
    RLConfig: {"model": "actor_rollout_ref.model", "trainer.async": "trainer.async_training"}
}
"""Block of each short name, by tree: ``hone train model.path=DIR`` is the policy's model, as in the other commands."""


def full_key(key: str, schema: type) -> str:
    """Return the key that a name means; any other name unchanged.

    >>> full_key("model.path", RLConfig)
    'actor_rollout_ref.model.path'
    """
    blocks = BLOCKS.get(schema, {})
    block = next((name for name in blocks if key.startswith(f"{name}.")), None)
    return key if block is None else blocks[block] + key.removeprefix(block)

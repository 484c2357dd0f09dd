"""The tables of all blocks in one."""

from hone.config.migration import actor, data, model, reward, rollout, run
from hone.config.migration.entries import Table

TABLE = Table({**data.ENTRIES, **model.ENTRIES, **actor.ENTRIES, **rollout.ENTRIES, **reward.ENTRIES, **run.ENTRIES})
"""What becomes of keys that the tree of `hone train` does not have."""

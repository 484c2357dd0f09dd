"""The tables of all blocks in one, for each command whose run verl has too."""

from collections.abc import Mapping

from hone.config.migration import actor, data, model, reward, rollout, run, sft, values
from hone.config.migration.entries import Changed, Table
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig

TABLES: dict[type, Table] = {
    RLConfig: Table(
        {**data.ENTRIES, **model.ENTRIES, **actor.ENTRIES, **rollout.ENTRIES, **reward.ENTRIES, **run.ENTRIES}
    ),
    SFTConfig: Table(sft.ENTRIES),
}
"""What becomes of keys that the tree does not have."""

VALUES: dict[type, Mapping[str, Changed]] = {RLConfig: values.VALUES, SFTConfig: sft.VALUES}
"""What becomes of values that a key of the tree takes only in verl."""

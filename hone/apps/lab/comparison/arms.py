"""Arms: runs whose configurations are equal apart from their seed and from what identifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.config.comparing import differences

SEED = "trainer.seed"
IDENTITY_KEYS = (
    "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger",
    "trainer.checkpoint_dir", "trainer.resume_", "trainer.save_freq", "trainer.max_ckpt_to_keep",
    "trainer.best_ckpt_", "trainer.async_save", "trainer.watchdog_seconds", "trainer.max_restarts",
    "trainer.timeline", "trainer.profile_steps", "trainer.rollout_dump_", "trainer.log_rollout_samples",
    "trainer.log_val_generations", "trainer.save_microbatch_steps", "trainer.save_steps_for_replay",
    "insight.", "preflight.",
)  # fmt: skip
"""Prefixes of keys that name a run or say what it writes; they do not change a number of it."""


def training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that can change what a run computes, the seed included."""
    return {key: value for key, value in config.items() if not key.startswith(IDENTITY_KEYS)}


def training_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of :func:`training_keys` whose values differ, with both values."""
    return differences(training_keys(first), training_keys(second))


def split_arms(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of the configurations of each arm, in order of first appearance.

    If all are of one arm, each is an arm of its own: what is compared then is the noise between seeds.
    """
    arms: list[tuple[dict[str, Any], list[int]]] = []
    for index, config in enumerate(configs):
        keys = {key: value for key, value in training_keys(config).items() if key != SEED}
        members = next((members for known, members in arms if known == keys), None)
        if members is None:
            arms.append((keys, [index]))
        else:
            members.append(index)
    if len(arms) == 1:
        return [[index] for index in range(len(configs))]
    return [members for _, members in arms]

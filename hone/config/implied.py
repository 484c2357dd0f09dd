"""Values that follow from other keys, where the user leaves them open."""

from __future__ import annotations

import logging
from typing import Any

from hone.config.check import Provenance
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig

log = logging.getLogger("hone")

CORRECTION = "algorithm.rollout_correction"
ASYNC_CORRECTION = "decoupled_token_is"
"""Rollout correction of asynchronous training: old log-probs of the trainer, truncated importance weights per token."""


def settle(config: Any, provenance: Provenance) -> None:
    """Set what asynchronous training implies: an engine process of its own, and a rollout correction.

    ``provenance`` says which keys were set, and gets those that are set here.
    """
    if not isinstance(config, RLConfig) or not RunSpec(config).asynchronous:
        return
    keys = config.trainer.async_training
    origin = f"from trainer.async_training.{'max_staleness' if keys.max_staleness else 'stream'}"
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    if config.trainer.runtime == "local" and rollout.name == "native" and rollout.num_replicas is None:
        rollout.num_replicas = 1
        provenance["actor_rollout_ref.rollout.num_replicas"] = origin
    if keys.max_staleness and not any(key.startswith(CORRECTION) for key in provenance):
        correction.preset = ASYNC_CORRECTION
        provenance[f"{CORRECTION}.preset"] = origin
    values = ", ".join(
        f"{key.rpartition('.')[2]}={_value(config, key)}" for key in provenance if provenance[key] == origin
    )
    if values:
        log.info("%s: %s", origin, values)


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config

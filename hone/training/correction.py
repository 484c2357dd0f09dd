"""What ``algorithm.rollout_correction`` amounts to: the named preset, the keys set beside it, and the loss that follows."""

from __future__ import annotations

from typing import Any

from hone.algorithms import ROLLOUT_CORRECTION_PRESETS
from hone.config.algorithm import RolloutCorrectionConfig
from hone.errors import ConfigError, did_you_mean


def correction_settings(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return every key of the block but ``preset``, with its value.

    A key at its default takes the preset's value; a key set to something else keeps it.

    Raises:
        ConfigError: no preset of that name.
    """
    settings = {name: value for name, value in vars(config).items() if name != "preset"}
    if config.preset is None:
        return settings
    if config.preset not in ROLLOUT_CORRECTION_PRESETS:
        raise ConfigError(
            f"unknown rollout correction '{config.preset}'",
            where="algorithm.rollout_correction.preset",
            fix=did_you_mean(config.preset, ROLLOUT_CORRECTION_PRESETS),
        )
    named, defaults = ROLLOUT_CORRECTION_PRESETS[config.preset], vars(RolloutCorrectionConfig())
    return {name: named[name] if value == defaults[name] else value for name, value in settings.items()}


def corrects(settings: dict[str, Any]) -> bool:
    """Whether the settings change the update: weights, rejection or veto."""
    return any(settings[name] is not None for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold"))


def loss_name(loss_mode: str, settings: dict[str, Any]) -> str:
    """The policy loss in use: in bypass mode with something to correct, ``vanilla`` becomes ``bypass_mode``."""
    if loss_mode == "vanilla" and settings["bypass_mode"]:
        return "bypass_mode" if corrects(settings) or settings["loss_type"] != "ppo_clip" else "vanilla"
    return loss_mode

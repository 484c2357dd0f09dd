"""Configured rollout correction: the preset with the keys that override it, and the resulting policy loss."""

from __future__ import annotations

from typing import Any

from hone.config.algorithm import RolloutCorrectionConfig
from hone.errors import UnknownMethod, did_you_mean
from hone.methods import ROLLOUT_CORRECTION_PRESETS


def correction_settings(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return the value of every key of the block except ``preset``.

    A key at its default gets the preset's value; other keys keep theirs.

    Raises UnknownMethod: the preset does not exist.
    """
    settings = {name: value for name, value in vars(config).items() if name != "preset"}
    if config.preset is None:
        return settings
    if config.preset not in ROLLOUT_CORRECTION_PRESETS:
        raise UnknownMethod(
            f"unknown rollout correction '{config.preset}'",
            where="algorithm.rollout_correction.preset",
            fix=did_you_mean(config.preset, ROLLOUT_CORRECTION_PRESETS),
        )
    named, defaults = ROLLOUT_CORRECTION_PRESETS[config.preset], vars(RolloutCorrectionConfig())
    return {name: named[name] if value == defaults[name] else value for name, value in settings.items()}


def corrects(settings: dict[str, Any]) -> bool:
    return any(settings[name] is not None for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold"))


def policy_loss_name(loss_mode: str, settings: dict[str, Any]) -> str:
    """Return the policy loss in use: ``vanilla`` becomes ``bypass_mode`` in bypass mode with a correction."""
    if loss_mode == "vanilla" and settings["bypass_mode"]:
        return "bypass_mode" if corrects(settings) or settings["loss_type"] != "ppo_clip" else "vanilla"
    return loss_mode

"""The trees there are, by the command that takes them."""

from __future__ import annotations

from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig

TREES: dict[str, type] = {
    "train": RLConfig,
    "sft": SFTConfig,
    "prefer": PreferenceConfig,
    "reward-model": RewardModelConfig,
}
"""Command to root of its tree."""

PRESET_KINDS: dict[type, str] = {
    RLConfig: "rl",
    SFTConfig: "sft",
    PreferenceConfig: "prefer",
    RewardModelConfig: "reward_model",
}
"""The folder of presets of each tree."""

AnyConfig = RLConfig | SFTConfig | PreferenceConfig | RewardModelConfig
"""The configuration of a run of any kind."""

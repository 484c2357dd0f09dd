"""The configuration trees, by command."""

from __future__ import annotations

from hone.config.model import ModelConfig
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.parallel import ParallelConfig
from hone.config.tree import RLConfig

TREES: dict[str, type] = {
    "train": RLConfig,
    "sft": SFTConfig,
    "prefer": PreferenceConfig,
    "reward-model": RewardModelConfig,
}
"""Root of the tree of each command."""

PRESET_KINDS: dict[type, str] = {
    RLConfig: "rl",
    SFTConfig: "sft",
    PreferenceConfig: "prefer",
    RewardModelConfig: "reward_model",
}
"""The folder of presets of each tree."""

OfflineConfig = SFTConfig | PreferenceConfig | RewardModelConfig  # the configuration of a run over a fixed dataset

AnyConfig = RLConfig | OfflineConfig  # the configuration of a run of any kind


def model_block(config: AnyConfig) -> tuple[str, ModelConfig]:
    """Return the path and the block of the trained model."""
    if isinstance(config, RLConfig):
        return "actor_rollout_ref.model", config.actor_rollout_ref.model
    return "model", config.model


def parallel_block(config: AnyConfig) -> ParallelConfig:
    """Return the block with the training backend and the parallel sizes of the trained model."""
    return config.actor_rollout_ref.actor if isinstance(config, RLConfig) else config

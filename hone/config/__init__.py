"""Configuration of a run: the typed tree, presets, loading and explaining.

``load_config(RLConfig, ["data.train_files=train.parquet", ...], preset="grpo")`` returns plain dataclasses;
``to_yaml`` writes them; ``documentation`` lists every key with its meaning.
"""

from hone.config.keys import KeyDoc, documentation
from hone.config.load import load_config, load_with_provenance, to_yaml
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig

__all__ = [
    "TREES",
    "AnyConfig",
    "KeyDoc",
    "PreferenceConfig",
    "RLConfig",
    "RewardModelConfig",
    "SFTConfig",
    "documentation",
    "load_config",
    "load_with_provenance",
    "to_yaml",
]

"""The typed configuration tree of `hone train`; the trees are the only source of defaults.

Every key is a dataclass field, and the string below it is its documentation (meaning, unit, default and reason). The page
``docs/config.md`` is generated from the trees. A key exists only when some code reads it.

Units: a *prompt* is one dataset row; a *sequence* is one sampled response with its prompt (``rollout.n`` per prompt);
a *step* is one pass of the RL loop (one batch of prompts), with one or several optimizer updates.

Each block is defined in a separate file.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.actor import ActorConfig, RefConfig
from hone.config.algorithm import AlgorithmConfig
from hone.config.critic import CriticConfig
from hone.config.data import DataConfig
from hone.config.distillation import DistillationConfig
from hone.config.fields import block
from hone.config.insight import InsightConfig
from hone.config.model import ModelConfig
from hone.config.preflight import RLPreflightConfig
from hone.config.ray import RayConfig
from hone.config.reward import RewardConfig
from hone.config.rollout import RolloutConfig
from hone.config.run import TrainerConfig


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained (actor), sampled (rollout), frozen (ref)."""

    model: ModelConfig = block(ModelConfig)
    """The policy's model."""
    actor: ActorConfig = block(ActorConfig)
    """Training."""
    rollout: RolloutConfig = block(RolloutConfig)
    """Generation."""
    ref: RefConfig = block(RefConfig)
    """Reference."""


@dataclass
class RLConfig:
    """`hone train`: reinforcement learning."""

    data: DataConfig = block(DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = block(ActorRolloutRefConfig)
    """The policy."""
    critic: CriticConfig = block(CriticConfig)
    """The value model."""
    reward: RewardConfig = block(RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = block(AlgorithmConfig)
    """The algorithm."""
    distillation: DistillationConfig = block(DistillationConfig)
    """Learning from teachers."""
    trainer: TrainerConfig = block(TrainerConfig)
    """Life cycle."""
    ray: RayConfig = block(RayConfig)
    """Worker processes."""
    preflight: RLPreflightConfig = block(RLPreflightConfig)
    """Checks before the run."""
    insight: InsightConfig = block(InsightConfig)
    """Detectors that watch the run."""

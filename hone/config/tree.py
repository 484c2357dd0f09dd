"""The typed configuration tree of `hone train`; the trees are the only source of defaults.

Every key is a dataclass field, and the string below it is its documentation (meaning, unit, default and reason). The page
``docs/config.md`` is generated from the trees. A key exists only when some code reads it.

Units: a *prompt* is one dataset row; a *sequence* is one sampled response with its prompt (``rollout.n`` per prompt);
a *step* is one pass of the RL loop (one batch of prompts), with one or several optimizer updates.

Each block is defined in a separate file.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.actor import LOSS_AGG_MODES, ActorConfig, RefConfig
from hone.config.algorithm import AlgorithmConfig
from hone.config.data import DataConfig
from hone.config.distillation import DistillationConfig
from hone.config.fields import block, choice, model_path, number
from hone.config.model import ModelConfig, OptimConfig
from hone.config.reward import RewardConfig
from hone.config.rollout import RolloutConfig
from hone.config.run import InsightConfig, OwnPoolConfig, RayConfig, RLPreflightConfig, TrainerConfig


@dataclass
class CriticModelConfig:
    """The value model."""

    path: str | None = model_path()
    """Model directory to start from, a causal or a token-classification model; null means the policy's."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    enable_activation_offload: bool | None = None
    """Keep activations of GPU layers in the host's memory until the backward pass; null means as for the policy."""


@dataclass
class CriticConfig(OwnPoolConfig):
    """The critic, for estimators that need values (gae) or process rewards (prime)."""

    enable: bool | None = None
    """Train a critic; null means when algorithm.adv_estimator needs values."""
    model: CriticModelConfig = block(CriticModelConfig)
    """The value model."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    """Optimizer of the critic."""
    ppo_mini_batch_size: int | None = number(None, low=1)
    """Prompts per optimizer update; null means the actor's."""
    ppo_epochs: int | None = number(None, low=1)
    """Passes over each batch; null means the actor's."""
    ppo_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""
    beta: float = number(0.05, above=0)
    """prime: the reward of a token is beta x its log-ratio to the reference."""
    cliprange_value: float = number(0.5, above=0)
    """Value predictions move at most this far from the old ones before the loss is clipped."""
    loss_agg_mode: str | None = choice(None, *LOSS_AGG_MODES)
    """Aggregation of per-token value losses; null means the actor's."""
    dtype: str | None = choice(None, "auto", "float32", "bfloat16", "float16")
    """Compute dtype; null means the actor's."""


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

"""The block ``critic``: the value model."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.actor import LOSS_AGG_MODES
from hone.config.fields import block, choice, model_path, number
from hone.config.model import OptimConfig
from hone.config.ray import OwnPoolConfig


@dataclass
class CriticModelConfig:
    """The value model."""

    path: str | None = model_path()
    """Model directory to start from, a causal or a token-classification model; null means the policy's."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


@dataclass
class CriticConfig(OwnPoolConfig):
    """The critic, for estimators that need values (gae)."""

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
    cliprange_value: float = number(0.5, above=0)
    """Value predictions move at most this far from the old ones before the loss is clipped."""
    loss_agg_mode: str | None = choice(None, *LOSS_AGG_MODES)
    """Aggregation of per-token value losses; null means the actor's."""
    dtype: str | None = choice(None, "auto", "float32", "bfloat16", "float16")
    """Compute dtype; null means the actor's."""

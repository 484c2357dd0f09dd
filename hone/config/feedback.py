"""Blocks of the RL tree that bring preferences into it: a trained reward model, and pairs of the policy's own answers."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, named, number
from hone.config.ray import OwnPoolConfig


@dataclass
class RewardModelUseConfig(OwnPoolConfig):
    """A trained scalar reward model, for example one of `hone reward-model`."""

    enable: bool = False
    """Score responses with a reward model."""
    path: str | None = None
    """Its directory: a sequence- or token-classification model with one label, and its tokenizer. With the policy's
    vocabulary it reads the tokens as sampled, else prompt and answer are rendered with its own chat template."""
    combine: str = choice("replace", "replace", "add")
    """replace: its score is the reward, and what a scorer for the data_source says is logged as reward/rule/mean; add: the
    two are added."""
    coef: float = number(1.0, above=0)
    """Factor of its score."""
    max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's."""


@dataclass
class OnlinePreferenceConfig:
    """Online preference optimisation: the best and the worst answer to each prompt are a pair to learn from."""

    loss_mode: str | None = named(None, "preference loss", instead="actor_rollout_ref.actor.preference_loss.beta")
    """Preference loss over those pairs (dpo, ipo, hinge, robust, sppo, orpo, simpo or cpo); null learns from advantages by
    policy_loss."""
    beta: float | None = number(None, above=0)
    """Its beta; null means the loss's default."""
    margin: float = number(0.0, low=0)
    """Least difference of rewards between best and worst; groups with less give no pair."""

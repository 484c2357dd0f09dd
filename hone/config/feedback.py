"""Blocks of the RL tree that bring preferences into it: a trained reward model, and pairs of the policy's own answers."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, named, number
from hone.config.ray import OwnPoolConfig


@dataclass
class RewardModelUseConfig(OwnPoolConfig):
    """A reward model: a scalar one, for example of `hone reward-model`, or a language model that judges in words."""

    enable: bool = False
    """Score responses with a reward model."""
    path: str | None = None
    """Its directory: a sequence- or token-classification model with one label, and its tokenizer. With the policy's
    vocabulary it reads the tokens as sampled, else prompt and answer are rendered with its own chat template. With
    kind=generative a causal language model."""
    kind: str = choice("discriminative", "discriminative", "generative")
    """discriminative: its one output after the last token is the score. generative: it writes a judgement under the rubric of
    reward.judge (prompt, max_score, temperature, max_tokens) with a native engine of its own, and the score read from that, 0
    to 1, counts; an answer without one is an error of the reward (on_error, max_error_rate)."""
    combine: str = choice("replace", "replace", "add")
    """replace: its score is the reward, and what a scorer for the data_source says is logged as reward/rule/mean; add: the
    two are added."""
    coef: float = number(1.0, above=0)
    """Factor of its score."""
    max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's. With kind=generative of all that is judged at one time."""


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

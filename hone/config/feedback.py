"""Blocks of the RL tree about preferences: a reward model, and pairs of the policy's answers."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, model_path, named, number
from hone.config.ray import OwnPoolConfig


@dataclass
class RewardModelUseConfig(OwnPoolConfig):
    """A reward model: a scalar one, for example from `hone reward-model`, or a language model that writes judgements."""

    enable: bool = False
    """Score responses with a reward model."""
    path: str | None = model_path()
    """Directory of a sequence- or token-classification model with one label, and its tokenizer. With the policy's vocabulary it
    reads the sampled tokens, else prompt and answer are rendered with its chat template. With kind=generative a causal language
    model."""
    kind: str = choice("discriminative", "discriminative", "generative")
    """discriminative: the score is the output after the last token. generative: the model writes a judgement with the rubric of
    reward.judge (prompt, max_score, temperature, max_tokens) in a separate native engine, and the score, 0 to 1, is read from
    the text; a judgement without a score gives no verdict (reward.max_no_verdict_rate)."""
    combine: str = choice("replace", "replace", "add")
    """replace: the model's score is the reward, and the scorer of the data_source is logged as reward/rule/mean; add: the
    two are added."""
    coef: float = number(1.0, above=0)
    """Factor of the model's score."""
    max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's. With kind=generative, of all answers judged at a time."""


@dataclass
class OnlinePreferenceConfig:
    """Online preference optimisation: the best and the worst answer to each prompt are a training pair."""

    loss_mode: str | None = named(None, "preference loss", instead="actor_rollout_ref.actor.preference_loss.beta")
    """Preference loss on those pairs (dpo, ipo, hinge, robust, sppo, orpo, simpo or cpo); null trains on advantages with
    policy_loss."""
    beta: float | None = number(None, above=0)
    """Its beta; null means the loss's default."""
    margin: float = number(0.0, low=0)
    """Least difference of rewards between best and worst; other groups give no pair."""

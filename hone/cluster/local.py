"""The local runtime: all roles of a run in the calling process, on one device."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hone.algorithms import advantage_estimators, preference_losses
from hone.cluster.reward_model import RewardModelWorker
from hone.cluster.roles import CriticWorker, PolicyWorker, ReferenceWorker
from hone.config.tree import RLConfig
from hone.data.tokenizer import load_tokenizer
from hone.generation import ENGINES
from hone.generation.protocol import Engine


class LocalRuntime:
    """Builds and holds the roles that the algorithm needs, and the engine that samples from the actor's own weights.

    Attributes:
        actor: the trained policy.
        reference: the frozen policy, or None when no KL term needs it.
        critic: the value model, or None when the estimator needs no values.
        reward_model: a trained model that scores, or None when only functions do.
        engine: generates from the actor's parameters.

    Args:
        config: of the run.
        device: for everything.
        tokenizer: for stop strings.
        total_steps: horizon of the schedules.
        resume: checkpoint directory to go on from, or None.
    """

    def __init__(
        self,
        config: RLConfig,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        *,
        total_steps: int,
        resume: Path | None,
    ) -> None:
        shared = config.actor_rollout_ref
        self.actor = PolicyWorker(config, device=device, total_steps=total_steps, resume=resume)
        self.reference = ReferenceWorker(config, self.actor, device=device) if needs_reference(config) else None
        self.critic = None
        if needs_critic(config):
            self.critic = CriticWorker(config, device=device, total_steps=total_steps, resume=resume)
        self.reward_model = None
        if config.reward.reward_model.enable:
            self.reward_model = RewardModelWorker(config, tokenizer, device=device)
        rollout = shared.rollout
        self.engine: Engine = ENGINES.get(rollout.name)(
            model=self.actor.model,
            tokenizer=tokenizer,
            device=device,
            dtype=shared.actor.dtype if rollout.dtype == "auto" else rollout.dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_cache_tokens=rollout.max_cache_tokens,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        )


def run_tokenizer(config: RLConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the run."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def needs_reference(config: RLConfig) -> bool:
    """Whether a KL term is on, or a preference loss compares with the reference."""
    actor = config.actor_rollout_ref.actor
    pairs = actor.preference_loss.loss_mode
    by_pairs = pairs is not None and "reference" in preference_losses.get(pairs).needs
    return config.algorithm.use_kl_in_reward or actor.use_kl_loss or by_pairs


def needs_critic(config: RLConfig) -> bool:
    """critic.enable, or when null whether the estimator needs values."""
    if config.critic.enable is not None:
        return config.critic.enable
    return "values" in advantage_estimators.get(config.algorithm.adv_estimator).needs

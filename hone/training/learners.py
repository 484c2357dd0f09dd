"""The learner of a run over a fixed dataset, and the heads and distances of teachers, of any run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from hone.algorithms.teacher import TeacherDistance
from hone.config.distillation import SAMPLED_MODES, TOP_K_MODES, WHOLE_MODES
from hone.config.model import ModelConfig
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import OfflineConfig, model_block
from hone.models.heads import Head, PolicyHead
from hone.models.loading import saved_settings
from hone.models.teacher import HiddenHead, TopKHead, output_layer
from hone.training.backends.protocol import ModelKind
from hone.training.objectives import LossFn, imitation_objective, token_loss_options
from hone.training.preferences import ScoreHead, bradley_terry_objective, loss_and_options, preference_objective


@dataclass(frozen=True)
class Learner:
    """Model and objective of a run."""

    kind: ModelKind
    head: Head  # computes ``log_probs``, or ``scores`` of a reward model
    objective: LossFn


def learner_of(config: OfflineConfig, device: torch.device) -> Learner:
    """Return the model and the objective of `hone sft`, `hone prefer` or `hone reward-model`.

    Raises ConfigError: the loss is unknown, or the logits of a teacher cannot be computed from its hidden states.
    """
    if isinstance(config, RewardModelConfig):
        return Learner("reward", ScoreHead(), bradley_terry_objective(config.loss.centering_coeff))
    if isinstance(config, PreferenceConfig):
        return Learner("policy", PolicyHead(), preference_objective(*loss_and_options(config)))
    head = PolicyHead(distance=teacher_distance(config, device))
    return Learner("policy", head, imitation_objective(config.distillation if config.distillation.enable else None))


def temperature_of(config: RLConfig | SFTConfig) -> float:
    """Return the temperature of the distributions that are compared; 1 for stored answers."""
    return config.actor_rollout_ref.rollout.temperature if isinstance(config, RLConfig) else 1.0


def teacher_model(config: RLConfig | SFTConfig, path: str | None) -> ModelConfig:
    """Return the configuration of a teacher's model: a directory, or the policy before training."""
    model = dataclasses.replace(model_block(config)[1], lora_rank=0, enable_gradient_checkpointing=False)
    if path is None:
        return model
    return dataclasses.replace(model, path=path, override_config={}, lora_adapter_path=None, quantization="none")


def teacher_head(config: RLConfig | SFTConfig) -> Head:
    """Return the head that gives what the distance compares with."""
    distillation, temperature = config.distillation, temperature_of(config)
    if distillation.loss_mode in TOP_K_MODES:
        settings = saved_settings(model_block(config)[1]).get_text_config()
        return TopKHead(distillation.topk, temperature, settings.vocab_size)
    return PolicyHead(temperature) if distillation.loss_mode in SAMPLED_MODES else HiddenHead()


def teacher_distance(config: RLConfig | SFTConfig, device: torch.device) -> TeacherDistance | None:
    """Return the distance of whole distributions that the policy's head computes; None if the loss has none. Raises
    ConfigError: a teacher's logits cannot be computed from its hidden states.
    """
    distillation = config.distillation
    if not distillation.enable or distillation.loss_mode in SAMPLED_MODES:
        return None
    layers = ()
    if distillation.loss_mode in WHOLE_MODES:
        layers = tuple(output_layer(teacher_model(config, path), device) for path in distillation.models)
    return TeacherDistance(
        distillation.loss_mode, temperature_of(config) or 1.0, token_loss_options(distillation), layers
    )

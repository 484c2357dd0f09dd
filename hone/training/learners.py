"""The learner of a run over a fixed dataset: kind of model, head, and objective of an update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.trees import OfflineConfig
from hone.models.heads import Head, PolicyHead
from hone.training.backends.protocol import ModelKind
from hone.training.objectives import imitation_objective
from hone.training.preferences import ScoreHead, bradley_terry_objective, loss_and_options, preference_objective
from hone.training.teacher import teacher_distance
from hone.training.updates import LossFn


@dataclass(frozen=True)
class Learner:
    """Model and objective of a run."""

    kind: ModelKind
    head: Head  # computes ``log_probs``, or ``scores`` of a reward model
    objective: LossFn


def learner_of(config: OfflineConfig, device: torch.device) -> Learner:
    """Return the model and the objective of `hone sft`, `hone prefer` or `hone reward-model`. Raises ConfigError: the
    loss is unknown, or the logits of a teacher cannot be computed from its hidden states.
    """
    if isinstance(config, RewardModelConfig):
        return Learner("reward", ScoreHead(), bradley_terry_objective(config.loss.centering_coeff))
    if isinstance(config, PreferenceConfig):
        return Learner("policy", PolicyHead(), preference_objective(*loss_and_options(config)))
    head = PolicyHead(distance=teacher_distance(config, device))
    return Learner("policy", head, imitation_objective(config.distillation if config.distillation.enable else None))

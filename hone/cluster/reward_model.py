"""Reward model of a run: a frozen scalar model that scores trajectories."""

from __future__ import annotations

import logging

import torch

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.roles import ModelRole
from hone.config.model import ModelConfig
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.images import content_text
from hone.data.ragged import Ragged
from hone.data.responses import Side, render_sides
from hone.data.tokenizer import decoded, load_tokenizer
from hone.data.types import Trajectory
from hone.errors import ConfigError
from hone.models.loading import load_reward_model
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.preferences import ScoreHead, response_scores

log = logging.getLogger(__name__)


JUDGED = "rm_score"
"""Column of the reward model's scores."""
JUDGEMENT = "rm_judgement"
"""Column of a generative reward model's texts."""


def reward_model_path(config: RLConfig) -> str:
    """Return the directory of the reward model.

    Raises:
        ConfigError: the path is not set.
    """
    path = config.reward.reward_model.path
    if path is None:
        raise ConfigError(
            "reward.reward_model.enable=true, but reward.reward_model.path is not set",
            fix="reward.reward_model.path=<run of hone reward-model>/checkpoints/step_<N>/actor",
            where="reward.reward_model.path",
        )
    return path


class RewardModelWorker(ModelRole):
    """Score trajectories with ``reward.reward_model.path``.

    A reward model with the policy's vocabulary reads the sampled tokens; any other gets prompt and answer as messages, in its
    chat template.

    Raises:
        ConfigError: the path is not set.
        ModelError: the directory has no scalar model.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        config, tokenizer, device = context.config, context.tokenizer, context.device
        settings, actor = config.reward.reward_model, config.actor_rollout_ref.actor
        path = reward_model_path(config)
        trusted = config.actor_rollout_ref.model.trust_remote_code
        self.policy_tokenizer, self.tokenizer = tokenizer, load_tokenizer(path, trust_remote_code=trusted)
        self.same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        if not self.same_tokens:
            log.info(
                "the reward model has another vocabulary than the policy: answers are rendered with its chat template"
            )
        budget = settings.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        self.engine = LocalBackend(
            load_reward_model(ModelConfig(path=path, trust_remote_code=trusted), device=device, trainable=False),
            ScoreHead(),
            TrainSettings(device, dtype=actor.dtype, max_tokens=budget),
        )

    @dispatch(Split.ROWS, objects=True)
    def score(self, batch: Batch) -> Batch:
        """Return ``rm_score``: the model's score of each episode."""
        trajectories: list[Trajectory] = batch.objects("trajectory")
        if self.same_tokens and not any(trajectory.images for trajectory in trajectories):
            prompts = [trajectory.prompt_ids for trajectory in trajectories]
            responses = [trajectory.response_ids for trajectory in trajectories]
        else:
            sides = [self._side(trajectory) for trajectory in trajectories]
            rendered = render_sides(sides, self.tokenizer)
            prompts, responses = [r.prompt_ids for r in rendered], [r.response_ids for r in rendered]
        texts = Batch(
            {
                "prompt_ids": Ragged.from_rows(prompts, torch.int64),
                "response_ids": Ragged.from_rows(responses, torch.int64),
            }
        )
        return Batch({JUDGED: response_scores(self.engine, texts)})

    def _side(self, trajectory: Trajectory) -> Side:
        messages, where = trajectory.sample.messages, f"row {trajectory.uid}"
        if messages is None:
            text = decoded(self.policy_tokenizer, trajectory.prompt_ids)
            return Side(text, trajectory.text, True, None, where)
        if trajectory.sample.images:  # a reward model reads text
            messages = [{**message, "content": content_text(message.get("content"))} for message in messages]
        return Side(messages, [{"role": "assistant", "content": trajectory.text}], True, None, where)

"""Reward model of a run: a frozen scalar model that scores trajectories, or a language model that judges every answer in text, from which
the score is parsed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.roles import ModelRole
from hone.config.model import ModelConfig
from hone.config.tree import RLConfig
from hone.data.answers import last_answer
from hone.data.batch import Batch
from hone.data.chat import render_prompts
from hone.data.images import content_text
from hone.data.ragged import Ragged
from hone.data.responses import Side, render_sides
from hone.data.seeding import derive_seed
from hone.data.tokenizer import decoded, load_tokenizer, stop_tokens
from hone.data.types import Trajectory
from hone.errors import ConfigError
from hone.generation.native.engine import NativeEngine
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.models.devices import dtype_on
from hone.models.loading import causal_lm, load_policy, load_reward_model
from hone.rewards.rubric import Rubric, question_of
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


class GenerativeRewardModelWorker:
    """Judge trajectories with the causal language model in ``reward.reward_model.path`` and the rubric of ``reward.judge``.

    It generates with a separate native engine. Concurrent prompts and judgements together have at most
    ``reward.reward_model.max_token_len_per_gpu`` tokens. An answer that is too long for that, or for the model's positions, is
    not judged and has no score.

    Raises:
        ConfigError: no path is given.
        ModelError: the directory holds no causal language model.
        RewardError: the rubric cannot be read or used.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        config, settings = context.config, context.config.reward.reward_model
        path, trusted = reward_model_path(config), config.actor_rollout_ref.model.trust_remote_code
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        self.seed, self.judge, self.rubric = (
            config.trainer.seed,
            config.reward.judge,
            Rubric.from_config(config.reward.judge),
        )
        self.policy_tokenizer, self.tokenizer = context.tokenizer, load_tokenizer(path, trust_remote_code=trusted)
        model = load_policy(
            ModelConfig(path=path, trust_remote_code=trusted), device=context.device, seed=self.seed, trainable=False
        )
        budget = settings.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        positions = getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(budget, positions or budget)
        self.engine = NativeEngine(
            model,
            self.tokenizer,
            device=context.device,
            dtype=dtype_on(context.device, actor.dtype),
            max_num_seqs=rollout.max_num_seqs,
            max_cache_tokens=budget,
            max_model_len=self.longest,
        )
        self.sampling = SamplingParams(
            max_tokens=self.judge.max_tokens,
            temperature=self.judge.temperature,
            stop_token_ids=stop_tokens(self.tokenizer, path),
        )

    @dispatch(Split.ROWS, objects=True)
    async def score(self, batch: Batch) -> Batch:
        """Return ``rm_score``, the parsed score of each episode (0 to 1, NaN without one), and ``rm_judgement``, its text."""
        trajectories: Sequence[Trajectory] = batch.objects("trajectory")
        requests = self._requests(trajectories)
        words = ["" if r else f"(not judged: more than {self.longest} tokens)" for r in requests]
        to_judge = [request for request in requests if request is not None]
        async for completion in self.engine.generate(to_judge):
            text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            words[int(completion.request_id)] = str(text)
        scores = [self.rubric.score(text) for text in words]
        values = torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float32)
        return Batch({JUDGED: values, JUDGEMENT: words})

    def _requests(self, trajectories: Sequence[Trajectory]) -> list[GenerationRequest | None]:
        """Return the request for each trajectory; None if it would be too long."""
        rendered = render_prompts(
            self.tokenizer,
            [[{"role": "user", "content": self._judge_prompt(trajectory)}] for trajectory in trajectories],
        )
        return [
            GenerationRequest(
                str(row), ids, self.sampling, seed=derive_seed(self.seed, "judge", trajectory.uid, trajectory.index)
            )
            if len(ids) + self.sampling.max_tokens <= self.longest
            else None
            for row, (ids, trajectory) in enumerate(zip(rendered, trajectories, strict=True))
        ]

    def _judge_prompt(self, trajectory: Trajectory) -> str:
        sample = trajectory.sample
        question = question_of(sample.messages, sample.extra_info) or self._prompt_text(trajectory)
        turns = trajectory.episode.messages if trajectory.episode is not None else []
        answer = last_answer(trajectory.text, {"episode": {"messages": turns}})
        return self.rubric.fill(question, answer, sample.ground_truth)

    def _prompt_text(self, trajectory: Trajectory) -> str:
        return decoded(self.policy_tokenizer, trajectory.prompt_ids, skip_special_tokens=True)

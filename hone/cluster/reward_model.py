"""Reward model of a run: a frozen scalar model that scores trajectories, or a language model that judges every answer in text, from which
the score is parsed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from transformers import AutoConfig

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Split, dispatch
from hone.cluster.roles import ModelRole
from hone.config.derived import RunSpec, as_judge
from hone.config.model import ModelConfig
from hone.config.pools import engine_devices
from hone.config.tree import RLConfig
from hone.data.answers import last_answer
from hone.data.batch import Batch
from hone.data.chat import render_prompts
from hone.data.images import content_text
from hone.data.ragged import Ragged
from hone.data.responses import Response, Side, render_sides
from hone.data.seeding import derive_seed
from hone.data.tokenizer import decoded, load_tokenizer, stop_tokens
from hone.data.types import Trajectory
from hone.errors import ConfigError, HoneError
from hone.generation import Engine, is_served
from hone.generation.build import build_engine
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.loading import load_policy, load_reward_model
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


def token_budget(config: RLConfig) -> int:
    """Return the tokens that a worker of the reward model reads at a time."""
    actor = config.actor_rollout_ref.actor
    return config.reward.reward_model.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu


def longest_judged(config: RLConfig) -> int:
    """Return the tokens of the longest sequence that an engine judges: the budget, or the positions of the reward model."""
    budget, trusted = token_budget(config), config.actor_rollout_ref.model.trust_remote_code
    saved = AutoConfig.from_pretrained(reward_model_path(config), trust_remote_code=trusted).get_text_config()
    return min(budget, getattr(saved, "max_position_embeddings", None) or budget)


def judging_engine(context: WorkerContext[RLConfig], tokenizer: Any, longest: int) -> Engine | None:
    """Build the engine of the reward model; None in a worker that lends its device to another's engine.

    Args:
        longest: tokens of the longest sequence.

    Raises:
        ConfigError: the engine refuses ``reward.reward_model.rollout``.
    """
    judge = RunSpec(context.config).judge
    assert judge is not None
    group, rollout = engine_devices(judge), judge.actor_rollout_ref.rollout
    if context.rank % group:
        return None
    judge.data.max_prompt_length, judge.data.max_response_length = longest, 0
    if not is_served(rollout) and rollout.max_cache_tokens is None:
        rollout.max_cache_tokens = token_budget(context.config)
    try:
        return build_engine(
            judge,
            model=lambda: load_policy(
                judge.actor_rollout_ref.model, device=context.device, seed=judge.trainer.seed, trainable=False
            ),
            tokenizer=tokenizer,
            device=context.device,
            shares_weights=False,
            number=context.rank // group,
            world=context.world // group,
            devices=context.engine_devices,
        )
    except HoneError as error:
        raise as_judge(error) from error


async def judged_by(engine: Engine, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
    """Yield what the engine of the reward model answers; its errors name the keys of ``reward.reward_model``."""
    try:
        async for completion in engine.generate(requests):
            yield completion
    except HoneError as error:
        raise as_judge(error) from error


class ScalarReader:
    """Trajectories as a scalar reward model reads them.

    One with the policy's vocabulary reads the sampled tokens; any other gets prompt and answer as messages, in its chat
    template.

    Raises:
        ConfigError: the path is not set.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        config, path = context.config, reward_model_path(context.config)
        self.model = ModelConfig(path=path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
        self.policy_tokenizer = context.tokenizer
        self.tokenizer = load_tokenizer(path, trust_remote_code=self.model.trust_remote_code)
        self.same_tokens = self.tokenizer.get_vocab() == self.policy_tokenizer.get_vocab()
        if not self.same_tokens:
            log.info(
                "the reward model has another vocabulary than the policy: answers are rendered with its chat template"
            )

    def _texts(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory | Response]:
        """Return what the model reads of each trajectory, as ``prompt_ids`` and ``response_ids``."""
        if self.same_tokens and not any(trajectory.images for trajectory in trajectories):
            return trajectories
        return render_sides([self._side(trajectory) for trajectory in trajectories], self.tokenizer)

    def _side(self, trajectory: Trajectory) -> Side:
        messages, where = trajectory.sample.messages, f"row {trajectory.uid}"
        if messages is None:
            text = decoded(self.policy_tokenizer, trajectory.prompt_ids)
            return Side(text, trajectory.text, True, None, where)
        if trajectory.sample.images:  # a reward model reads text
            messages = [{**message, "content": content_text(message.get("content"))} for message in messages]
        return Side(messages, [{"role": "assistant", "content": trajectory.text}], True, None, where)


class RewardModelWorker(ScalarReader, ModelRole):
    """Score trajectories with the scalar model of ``reward.reward_model.path``.

    Raises:
        ModelError: the directory has no scalar model.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        super().__init__(context)
        config, device = context.config, context.device
        self.engine = LocalBackend(
            load_reward_model(self.model, device=device, trainable=False),
            ScoreHead(),
            TrainSettings(device, dtype=config.actor_rollout_ref.actor.dtype, max_tokens=token_budget(config)),
        )

    @dispatch(Split.ROWS, objects=True)
    def score(self, batch: Batch) -> Batch:
        """Return ``rm_score``: the model's score of each episode."""
        texts = self._texts(batch.objects("trajectory"))
        columns = {
            name: Ragged.from_rows([getattr(text, name) for text in texts], torch.int64)
            for name in ("prompt_ids", "response_ids")
        }
        return Batch({JUDGED: response_scores(self.engine, Batch(columns))})


class ServedRewardModelWorker(ScalarReader):
    """Score trajectories with an engine that runs the scalar model of ``reward.reward_model.path``.

    On Ray an engine over several devices belongs to the worker on the first of them; the others only lend theirs.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        super().__init__(context)
        self.longest = longest_judged(context.config)
        self.served = judging_engine(context, self.tokenizer, self.longest)

    def close(self) -> None:
        if self.served is not None:
            self.served.close()

    @dispatch(Split.ROWS, objects=True)
    async def score(self, batch: Batch) -> Batch:
        """Return ``rm_score``: the model's score of each episode."""
        assert self.served is not None  # a worker that lends its device gets no rows
        ids = [[*text.prompt_ids, *text.response_ids] for text in self._texts(batch.objects("trajectory"))]
        longest = max(map(len, ids))
        if longest >= self.longest:
            raise ConfigError(
                f"an answer has {longest} tokens with its prompt, but the reward model reads fewer than {self.longest}",
                why="a score of a part would be that of another answer",
                fix=f"data.max_response_length=<at least {longest - self.longest + 1} less>, or where the model has the "
                f"positions, reward.reward_model.max_token_len_per_gpu={longest + 1}",
                where="reward.reward_model.max_token_len_per_gpu",
            )
        sampling, scores = SamplingParams(max_tokens=1), torch.full((len(ids),), math.nan)
        requests = [GenerationRequest(str(row), tokens, sampling) for row, tokens in enumerate(ids)]
        async for completion in judged_by(self.served, requests):
            assert completion.score is not None
            scores[int(completion.request_id)] = completion.score
        return Batch({JUDGED: scores})


class GenerativeRewardModelWorker:
    """Judge trajectories with the causal language model in ``reward.reward_model.path`` and the rubric of ``reward.judge``.

    It generates with an engine of its own, ``reward.reward_model.rollout``. Prompt and judgement together have at most
    ``reward.reward_model.max_token_len_per_gpu`` tokens. An answer that is too long for that, or for the model's positions, is
    not judged and has no score. On Ray an engine over several devices belongs to the worker on the first of them; the others
    only lend theirs.

    Raises:
        ConfigError: no path is given.
        ModelError: the directory holds no causal language model.
        RewardError: the rubric cannot be read or used.
    """

    def __init__(self, context: WorkerContext[RLConfig]) -> None:
        config, path = context.config, reward_model_path(context.config)
        self.seed, self.judge = config.trainer.seed, config.reward.judge
        self.rubric = Rubric.from_config(self.judge)
        trusted = config.actor_rollout_ref.model.trust_remote_code
        self.policy_tokenizer, self.tokenizer = context.tokenizer, load_tokenizer(path, trust_remote_code=trusted)
        self.longest = longest_judged(config)
        self.sampling = SamplingParams(
            max_tokens=self.judge.max_tokens,
            temperature=self.judge.temperature,
            stop_token_ids=stop_tokens(self.tokenizer, path),
        )
        self.engine = judging_engine(context, self.tokenizer, self.longest)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    @dispatch(Split.ROWS, objects=True)
    async def score(self, batch: Batch) -> Batch:
        """Return ``rm_score``, the parsed score of each episode (0 to 1, NaN without one), and ``rm_judgement``, its text."""
        assert self.engine is not None  # a worker that lends its device gets no rows
        trajectories: Sequence[Trajectory] = batch.objects("trajectory")
        requests = self._requests(trajectories)
        words = ["" if r else f"(not judged: more than {self.longest} tokens)" for r in requests]
        to_judge = [request for request in requests if request is not None]
        async for completion in judged_by(self.engine, to_judge):
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

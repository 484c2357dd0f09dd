"""Validation: answer held-out prompts, score them, and average by data source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents import single_turn
from hone.config.tree import RLConfig
from hone.data.prompts import PromptDataset
from hone.data.seeding import derive_seed
from hone.data.types import Trajectory
from hone.generation.protocol import Engine, SamplingParams
from hone.insight.validation import validation_metrics
from hone.rewards.manager import RewardManager
from hone.rewards.score import Score
from hone.trainers.inputs import prompt_dataset, validation_sampling


@dataclass
class Evaluation:
    """Scored answers to held-out prompts.

    Attributes:
        metrics: ``val-core/...`` and ``val-aux/...``.
        trajectories: in the order of the dataset, n a prompt.
        scores: of each trajectory.
    """

    metrics: dict[str, float]
    trajectories: list[Trajectory]
    scores: list[Score]


async def evaluate(
    dataset: PromptDataset,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardManager,
    sampling: SamplingParams,
    *,
    n: int,
    seed: int,
    batch_size: int | None = None,
) -> Evaluation:
    """Ask every prompt ``n`` times, ``batch_size`` prompts at a time (None: all), and score the answers. The draws depend on
    the seed and the row only.
    """
    samples = [dataset[row] for row in range(len(dataset))]

    def seed_of(uid: str, index: int) -> int:
        return derive_seed(seed, "validation", uid, index)

    size = batch_size or max(1, len(samples))
    played = [
        trajectory
        for start in range(0, len(samples), size)
        async for trajectory in single_turn.play(
            samples[start : start + size], engine, tokenizer, sampling, n=n, seed_of=seed_of
        )
    ]
    position = {sample.uid: row for row, sample in enumerate(samples)}
    played.sort(key=lambda t: (position[t.uid], t.index))
    scores = await rewards.score(played)
    metrics = validation_metrics(
        [t.sample.data_source for t in played], [t.uid for t in played], score_columns(scores), n
    )
    return Evaluation(metrics, played, scores)


def score_columns(scores: list[Score]) -> dict[str, list[Any]]:
    """Column ``reward`` and one for every term and extra; None where a score lacks it."""
    names = {name for score in scores for name in (*score.terms, *score.extra)}
    columns: dict[str, list[Any]] = {"reward": [score.total for score in scores]}
    for name in sorted(names - {"reward"}):
        columns[name] = [score.terms.get(name, score.extra.get(name)) for score in scores]
    return columns


class Validator:
    """Validation as a run sets it up; does nothing when the run has no validation files."""

    def __init__(
        self, config: RLConfig, engine: Engine, tokenizer: PreTrainedTokenizerBase, rewards: RewardManager
    ) -> None:
        self.config, self.engine, self.tokenizer, self.rewards = config, engine, tokenizer, rewards
        self.dataset: PromptDataset | None = None
        if config.data.val_files:
            self.dataset = prompt_dataset(config.data, config.data.val_files, tokenizer, config.data.val_max_samples)

    def data_sources(self) -> Counter[str]:
        """How many rows each data source has."""
        return self.dataset.data_sources() if self.dataset else Counter()

    async def run(self) -> Evaluation | None:
        """Validate with the engine's present weights."""
        if self.dataset is None:
            return None
        return await evaluate(
            self.dataset,
            self.engine,
            self.tokenizer,
            self.rewards,
            validation_sampling(self.config, self.tokenizer),
            n=self.config.actor_rollout_ref.rollout.val_kwargs.n,
            seed=self.config.trainer.seed,
            batch_size=self.config.data.val_batch_size,
        )

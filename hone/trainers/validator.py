"""Validation as a run does it: its prompts are answered and scored by the roles."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.config.tree import RLConfig
from hone.data.prompts import PromptDataset
from hone.trainers.episodes import Episodes, joined
from hone.trainers.inputs import prompt_dataset, validation_sampling


class Validator:
    """Asks the validation prompts; does nothing when the run has no validation files.

    Args:
        config: of the run.
        tokenizer: of the run.
        episodes: plays and scores.
    """

    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase, episodes: Episodes) -> None:
        self.config, self.episodes = config, episodes
        self.dataset: PromptDataset | None = None
        if config.data.val_files:
            self.dataset = prompt_dataset(config, config.data.val_files, tokenizer, config.data.val_max_samples)
        self.sampling = validation_sampling(config, tokenizer)

    def data_sources(self) -> Counter[str]:
        """How many rows each data source has."""
        return self.dataset.data_sources() if self.dataset else Counter()

    async def run(self) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        """Ask every prompt ``val_kwargs.n`` times, ``data.val_batch_size`` prompts at a time, with the present weights.

        The draws depend on the seed and the row only. Returns the metrics, and the first answers as they are written.
        """
        if self.dataset is None:
            return None
        config, samples = self.config, [self.dataset[row] for row in range(len(self.dataset))]
        n, size = config.actor_rollout_ref.rollout.val_kwargs.n, config.data.val_batch_size or len(samples)
        seeding = (config.trainer.seed, "validation")
        played = [
            await self.episodes.play(samples[start : start + size], self.sampling, n=n, seeding=seeding)
            for start in range(0, len(samples), size)
        ]
        scored = await self.episodes.score(joined(played), training=False)
        return await self.episodes.work.validation(scored, n, config.trainer.log_val_generations)

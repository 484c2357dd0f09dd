"""Validation during a run: the roles answer and score its prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.config.tree import RLConfig
from hone.data.prompts import PromptDataset
from hone.trainers.episodes import Episodes, concat_batches
from hone.trainers.inputs import prompt_dataset, validation_sampling


class Validator:
    """Validation of a run; does nothing without validation files.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        episodes: playing and scoring of episodes.
    """

    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase, episodes: Episodes) -> None:
        self.config, self.episodes = config, episodes
        self.dataset: PromptDataset | None = None
        if config.data.val_files:
            self.dataset = prompt_dataset(config, config.data.val_files, tokenizer, config.data.val_max_samples)
        self.sampling = validation_sampling(config, tokenizer)

    def data_sources(self) -> Counter[str]:
        """Return the number of rows by data source."""
        return self.dataset.data_sources() if self.dataset else Counter()

    async def run(
        self, version: int | None, *, during_training: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]] | None:
        """Answer every prompt ``val_kwargs.n`` times with the current weights, ``data.val_batch_size`` prompts at a time.

        The random streams depend only on seed and row.

        Args:
            version: version of the weights that must have sampled all answers; None if the engine does not count them.
            during_training: leave a share of the engines to the groups under way, see :class:`ValidationTask`.

        Returns:
            The metrics and the first records; None without a dataset.

        Raises:
            InvariantError: an answer is by another version of the weights.
        """
        if self.dataset is None:
            return None
        config, samples = self.config, [self.dataset[row] for row in range(len(self.dataset))]
        n, size = config.actor_rollout_ref.rollout.val_kwargs.n, config.data.val_batch_size or len(samples)
        seeding = (config.trainer.seed, "validation")
        play = self.episodes.play_during_training if during_training else self.episodes.play
        played = [
            await play(samples[start : start + size], self.sampling, n=n, seeding=seeding)
            for start in range(0, len(samples), size)
        ]
        scored = await self.episodes.score(concat_batches(played), training=False)
        return await self.episodes.batch_ops.validation(scored, n, config.trainer.log_val_generations, version)

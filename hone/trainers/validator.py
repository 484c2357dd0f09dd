"""Validation during a run: the roles answer and score its prompts."""

from __future__ import annotations

import time
from collections import Counter

from transformers import PreTrainedTokenizerBase

from hone.config.tree import RLConfig
from hone.data.prompts import PromptDataset
from hone.insight.run_directory import RunDirectory, read_metrics
from hone.trainers.episodes import Episodes, concat_batches
from hone.trainers.inputs import prompt_dataset, validation_sampling

TESTING = "timing_s/testing"
"""Metric of every validation: its seconds."""


class Validator:
    """Validation of a run; does nothing without validation files.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        episodes: playing and scoring of episodes.
        directory: directory of the run, for the records.
    """

    def __init__(
        self, config: RLConfig, tokenizer: PreTrainedTokenizerBase, episodes: Episodes, directory: RunDirectory
    ) -> None:
        self.config, self.episodes, self.directory = config, episodes, directory
        self.dataset: PromptDataset | None = None
        if config.data.val_files:
            self.dataset = prompt_dataset(config, config.data.val_files, tokenizer, config.data.val_max_samples)
        self.sampling = validation_sampling(config, tokenizer)

    def data_sources(self) -> Counter[str]:
        """Return the number of rows by data source."""
        return self.dataset.data_sources() if self.dataset else Counter()

    async def run(self, step: int, *, version: int | None, during_training: bool = False) -> dict[str, float]:
        """Answer every prompt ``val_kwargs.n`` times with the current weights, ``data.val_batch_size`` prompts at a time.

        The random streams depend only on seed and row. The first answers are written to ``validation/``.

        Args:
            step: step of the weights.
            version: version of the weights that must have sampled all answers; None if the engine does not count them.
            during_training: leave a share of the engines to the groups under way, see
                :class:`~hone.trainers.validation_task.ValidationTask`.

        Returns:
            The metrics; empty without a dataset.

        Raises:
            InvariantError: an answer is by another version of the weights.
        """
        if self.dataset is None:
            return {}
        started = time.perf_counter()
        config, samples = self.config, [self.dataset[row] for row in range(len(self.dataset))]
        n, size = config.actor_rollout_ref.rollout.val_kwargs.n, config.data.val_batch_size or len(samples)
        seeding = (config.trainer.seed, "validation")
        play = self.episodes.play_during_training if during_training else self.episodes.play
        played = [
            await play(samples[start : start + size], self.sampling, n=n, seeding=seeding)
            for start in range(0, len(samples), size)
        ]
        scored = await self.episodes.score(concat_batches(played), training=False)
        shown = config.trainer.log_val_generations
        metrics, records = await self.episodes.batch_ops.validation(scored, n, shown, version)
        if records:
            self.directory.write_validation(step, records)
        return {**metrics, TESTING: time.perf_counter() - started}

    def is_logged(self, step: int) -> bool:
        """Return whether ``metrics.jsonl`` has the validation of a step."""
        return any(row["step"] == step and TESTING in row for row in read_metrics(self.directory.path))

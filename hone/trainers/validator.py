"""Validation during a run: the roles answer and score its prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from hone.cluster.handles import AnyBatch, Rollout, Work, concat_batches
from hone.config.tree import RLConfig
from hone.data.prompts import PromptDataset
from hone.insight.run_directory import RunDirectory, read_metrics
from hone.together import gather_or_cancel
from hone.trainers.inputs import prompt_dataset, validation_sampling

if TYPE_CHECKING:
    from hone.agents.suites import Suite, TaskScore

TESTING = "timing_s/testing"
"""Metric of every validation: its seconds."""
FAILED = "val-suite/failed"

log = logging.getLogger("hone")


class Validator:
    """Validation of a run; does nothing without validation files and suites. ``judged``: function that returns a batch with its scores."""

    def __init__(
        self,
        config: RLConfig,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        work: Work,
        judged: Callable[..., Awaitable[AnyBatch]],
        directory: RunDirectory,
        suites: Sequence[Suite] = (),
    ) -> None:
        self.config, self.rollout, self.work, self._judged, self.directory = config, rollout, work, judged, directory
        self.dataset: PromptDataset | None = None
        if config.data.val_files:
            self.dataset = prompt_dataset(config, config.data.val_files, tokenizer, config.data.val_max_samples)
        self.sampling = validation_sampling(config, tokenizer)
        self.suites = suites
        self._worked: set[Suite] = set()
        self.has_work = self.dataset is not None or bool(suites)  # whether there is anything to validate on

    def data_sources(self) -> Counter[str]:
        """Return the number of rows by data source."""
        return self.dataset.data_sources() if self.dataset else Counter()

    def __len__(self) -> int:
        """Return the number of answers of a validation."""
        return len(self.dataset or ()) * self.config.actor_rollout_ref.rollout.val_kwargs.n

    async def run(self, step: int, *, version: int | None, during_training: bool = False) -> dict[str, float]:
        """Answer every prompt ``val_kwargs.n`` times with the current weights, ``data.val_batch_size`` prompts at a time.

        The random streams depend only on seed and row. The first answers are written to ``validation/``.

        Args:
            step: step of the weights.
            version: version of the weights that must have sampled all answers; None if the engine does not count them.
            during_training: leave a share of the engines to the groups under way, see
                :class:`~hone.trainers.validator.ValidationTask`.

        Returns:
            The metrics; empty without a dataset and suites.

        Raises:
            InvariantError: an answer is by another version of the weights.
        """
        started, metrics = time.perf_counter(), dict[str, float]()
        if self.dataset is not None:
            metrics |= await self._answer(self.dataset, step, version, during_training)
        if self.suites:
            metrics |= await self._run_suites(step, during_training)
        return metrics and {**metrics, TESTING: time.perf_counter() - started}

    async def _answer(
        self, dataset: PromptDataset, step: int, version: int | None, during_training: bool
    ) -> dict[str, float]:
        config, samples = self.config, [dataset[row] for row in range(len(dataset))]
        n, size = config.actor_rollout_ref.rollout.val_kwargs.n, config.data.val_batch_size or len(samples)
        seeding = (config.trainer.seed, "validation")
        play = self.rollout.play_during_training if during_training else self.rollout.play
        played = [
            await play(samples[start : start + size], self.sampling, n=n, seeding=seeding)
            for start in range(0, len(samples), size)
        ]
        scored = await self._judged(concat_batches(played), training=False)
        shown = config.trainer.log_val_generations
        metrics, records = await self.work.validation(scored, n, shown, version)
        if records:
            self.directory.write_validation(step, records)
        return metrics

    async def _run_suites(self, step: int, during_training: bool) -> dict[str, float]:
        """Run the suites with the current weights; the failure of one that has worked before is counted."""
        from hone.agents.suites import SuiteError, all_metrics, write_scores

        folder, limit = self.directory.path / "suites" / f"step_{step}", self.config.data.val_max_samples
        scores: list[TaskScore] = []
        failed = 0
        for suite in self.suites:
            try:
                scores += await self.rollout.run_suite(
                    0, suite, folder, limit, self.sampling.stop_token_ids, during_training
                )
                self._worked.add(suite)
            except SuiteError as error:
                if suite not in self._worked:
                    raise
                log.error("%s", error)
                failed += 1
        write_scores(folder, scores)
        return all_metrics(scores) | {FAILED: float(failed)}

    def is_logged(self, step: int) -> bool:
        """Return whether ``metrics.jsonl`` has the validation of a step."""
        return any(row["step"] == step and TESTING in row for row in read_metrics(self.directory.path))


def suites_of(config: RLConfig) -> list[Suite]:
    """Return the suites of other packages that a run validates on. Raises ConfigError: one is wrong, or its package is missing."""
    if not config.trainer.val_suites:
        return []
    from hone.agents.suites import read_suites

    return read_suites(config.trainer.val_suites, config.trainer.suite_python, "trainer.val_suites")


class ValidationTask:
    """The validation of one step's weights, while the next step generates and trains.

    One at a time: the next weight sync waits for it, so all its answers are by the same weights.

    Args:
        validate: function that validates the weights of a step and logs the metrics.
        limit: function that sets the share of the engines' requests that validation may take; None means no limit.
        share: this share while groups are under way.

    Attributes:
        step: step whose weights are validated, until :meth:`collect`; None if there is none.
    """

    def __init__(
        self,
        validate: Callable[[int], Awaitable[None]],
        limit: Callable[[float | None], Awaitable[None]],
        share: float,
    ) -> None:
        self._validate, self._limit, self._share = validate, limit, share
        self.step: int | None = None
        self._task: asyncio.Task[object] | None = None
        self._alone = asyncio.Event()

    async def begin(self, step: int, on_end: Callable[[], None]) -> None:
        """Start to validate the weights of a step; ``on_end`` is called at the end, also after an error."""
        assert self.step is None, "the validation of an earlier step has not ended"
        self.step = step
        self._alone.clear()
        await self._limit(self._share)
        both = gather_or_cancel([self._play(step), self._lift()])
        self._task = asyncio.get_running_loop().create_task(both, name=f"validation {step}")
        self._task.add_done_callback(lambda _: on_end())

    def lift(self) -> None:
        """Let validation take all of the engines: no group is under way, and none begins before it ends."""
        self._alone.set()

    @property
    def has_ended(self) -> bool:
        """True if no validation is under way."""
        return self._task is None or self._task.done()

    def collect(self) -> None:
        """Take note of the end of the validation, and raise its error if it failed."""
        task, self._task, self.step = self._task, None, None
        if task is not None:
            task.result()

    async def _play(self, step: int) -> None:
        try:
            await self._validate(step)
        finally:
            self._alone.set()

    async def _lift(self) -> None:
        await self._alone.wait()
        await self._limit(None)

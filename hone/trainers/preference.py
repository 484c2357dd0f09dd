"""Trainer of `hone prefer` and `hone reward-model`: a policy or scalar model learns from preferences.

A row is a pair of responses or a labelled response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.algorithms import kto_kl
from hone.algorithms.preference_losses import COUNTED_BY
from hone.cluster.handles import AnyBatch, FrozenPolicy
from hone.cluster.supervisor import Supervisor
from hone.config.offline import PreferenceConfig, RewardModelConfig
from hone.config.specs import OfflineSpec
from hone.data.batch import Batch
from hone.data.custom import row_reader
from hone.data.files import file_list
from hone.data.preferences import PreferenceDataset, preference_batch, preference_columns
from hone.errors import DataError
from hone.insight.metrics import MetricStore
from hone.trainers.attempts import supervised
from hone.trainers.offline import OfflineTrainer
from hone.training.preferences import bradley_terry, last_scores, loss_and_options, measure, mismatched_rows

CHUNK = 1024
"""Rows per chunk when the reference is precomputed."""


def train(config: PreferenceConfig | RewardModelConfig) -> int:
    """Run `hone prefer` or `hone reward-model` and return the exit code."""
    return supervised(config, lambda config, supervisor: PreferenceTrainer(config, supervisor).fit())


class PreferenceTrainer(OfflineTrainer[PreferenceConfig | RewardModelConfig, PreferenceDataset]):
    """Trainer of one run over preferences; the configuration's class decides what is trained.

    Raises:
        DataError: the data do not fit the loss.
    """

    def __init__(self, config: PreferenceConfig | RewardModelConfig, supervisor: Supervisor | None = None) -> None:
        super().__init__(config, supervisor)
        self.spec = OfflineSpec(config)
        self.reference: FrozenPolicy | None = None
        if "reference" in self.runtime:
            self.reference = self.runtime.group("reference")
        if self.reference is not None and self.spec.precomputes_reference:
            for dataset in (self.dataset, self.validation):
                if dataset is not None:
                    self._precompute(dataset)
            self.reference.release().result()
            self.reference = None

    def open_dataset(self, files: Any, max_samples: int) -> PreferenceDataset:
        """Load the preferences in ``files``, and check that they fit the loss.

        Raises:
            DataError: they do not.
        """
        data = self.config.data
        margin = None if isinstance(self.config, PreferenceConfig) else self.config.loss.margin_key
        dataset = PreferenceDataset(
            file_list(files),
            self.tokenizer,
            preference_columns(data, margin),
            max_length=data.max_length,
            truncation=data.truncation,
            max_samples=max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            read=row_reader(data, self.tokenizer),
            image_key=data.image_key,
            image_processor=self.image_processor,
        )
        pairs = not isinstance(self.config, PreferenceConfig) or "pairs" in OfflineSpec(self.config).loss_needs
        require_fitting(dataset, "data.train_files" if files == data.train_files else "data.val_files", pairs=pairs)
        return dataset

    def batch(self, rows: Sequence[Any]) -> Batch:
        """Convert rows to columns with :func:`~hone.data.preferences.preference_batch`."""
        return preference_batch(rows)

    def prepare(self, batch: Batch, metrics: MetricStore) -> AnyBatch:
        """Give the batch to the runtime, with the log-probs of the reference and the KL estimate that the loss needs."""
        with metrics.timer("ref"):
            return self._compared(batch)

    def measure(self, batch: Batch) -> dict[str, float]:
        """Return ``val/loss``, and the metrics of the loss as ``val/<metric>``."""
        compared = self._compared(batch)
        outputs = self.outputs(compared)
        if isinstance(self.config, PreferenceConfig):
            loss, options = loss_and_options(self.config)
            value, metrics, counts = measure(loss, outputs.ragged("log_probs"), self.runtime.fetch(compared), options)
        else:
            scores = last_scores(outputs.ragged("scores"))
            value, metrics, counts = bradley_terry(scores, batch, self.config.loss.centering_coeff)
        counted = {name: float(mean) for name, mean in metrics.items() if counts[COUNTED_BY.get(name, "units")]}
        return {"val/loss": float(value), **{f"val/{name}": mean for name, mean in counted.items()}}

    def _compared(self, batch: Batch) -> AnyBatch:
        """Give the batch to the runtime, and add the columns of a reference that is still there."""
        if self.reference is None:
            return self.runtime.put(batch)
        if "kl" in self.spec.loss_needs:
            batch.meta["kl"] = self._kl(batch)
        there = self.runtime.put(batch)
        return there.updated(self.reference.log_probs(there).result())

    def _kl(self, batch: Batch) -> float:
        """Return KTO's estimate of the policy's KL, over responses after the prompts of other rows."""
        assert self.reference is not None
        rows = mismatched_rows(batch)
        there = self.runtime.put(rows)
        policy = self.outputs(there).ragged("log_probs")
        reference = self.runtime.fetch(self.reference.log_probs(there).result()).ragged("ref_log_probs")
        return float(kto_kl(policy.to_padded(), reference.to_padded(), rows.ragged("response_mask").to_padded()))

    def _precompute(self, dataset: PreferenceDataset) -> None:
        """Store the reference's log-probs of every response of a dataset."""
        assert self.reference is not None
        for start in range(0, len(dataset), CHUNK):
            rows = [dataset[row] for row in range(start, min(start + CHUNK, len(dataset)))]
            batch = self.runtime.put(preference_batch(rows))
            columns = self.runtime.fetch(self.reference.log_probs(batch).result()).ragged("ref_log_probs").to_lists()
            responses = (response for row in rows for _, response in row.responses)
            for response, log_probs in zip(responses, columns, strict=True):
                response.ref_log_probs = log_probs


def require_fitting(dataset: PreferenceDataset, key: str, *, pairs: bool) -> None:
    """Check that the data fit the loss.

    Args:
        dataset: rows.
        key: configuration key of the files.
        pairs: whether the loss compares the sides of a pair.

    Raises:
        DataError: the loss compares pairs, but rows have labels; or all labels are the same.
    """
    if pairs and not dataset.paired:
        raise DataError(
            f"the rows of {key} are labelled single responses, but the loss compares pairs",
            fix="set loss.name=kto, or use data with columns chosen and rejected",
            where=key,
        )
    good, bad = dataset.labels()
    if not good or not bad:
        raise DataError(
            f"all {good + bad} labels of {key} are {'true' if good else 'false'}",
            why="a preference needs both good and bad responses",
            fix="add responses with the other label",
            where=key,
        )

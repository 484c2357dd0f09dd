"""A model and its optimizer in a checkpoint: staged in memory, then written, and read back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from hone.errors import CheckpointError
from hone.training.checkpoints.checksums import leave_checksums
from hone.training.checkpoints.optimizer_state import AVERAGE, load_state, named_state
from hone.training.checkpoints.shards import ShardStager, dist_rank, load_shards, read_index
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import stage_weights
from hone.training.loss_scale import LossScale
from hone.training.weight_average import WeightAverage

_LOSS_SCALE = "loss_scale"

log = logging.getLogger("hone")


class ModelStager:
    """Stages the checkpoints of one model.

    Args:
        model: a Hugging Face model of any layout, adapters included.
        optimizer: of the trained parameters, or None.
        loss_scale: of the updates, or None.
        average: of the trained parameters, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_scale: LossScale | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss_scale, self._average = model, optimizer, loss_scale, average
        self._shards = ShardStager()

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy the data that this rank writes. Collective.

        Args:
            location: directory or URL of the new checkpoint.
            name: "actor" or "critic".
            tokenizer: saved with the model.

        Returns:
            A function that writes the files, without collectives, in any thread and during training.
        """
        checkpoint = Storage(location).recording()
        writes = [stage_weights(self._model, checkpoint / name, tokenizer)]
        if self._optimizer is not None:
            tensors, about = named_state(self._model, self._optimizer)
            if self._loss_scale is not None:
                about[_LOSS_SCALE] = dataclasses.asdict(self._loss_scale)
            if self._average is not None:
                tensors |= _average_tensors(self._average)
                averaged = checkpoint / f"{name}_ema"
                writes.append(stage_weights(self._model, averaged, tokenizer, values=self._average.values))
            writes.append(self._shards.stage(tensors, about, checkpoint / optimizer_folder(name)))
        rank = dist_rank()

        def write() -> None:
            while writes:  # frees what is written
                writes.pop(0)()
            leave_checksums(checkpoint, name, rank)

        return write

    def restore(self, location: str, name: str) -> None:
        """Load the optimizer state of a checkpoint of any layout; weights are loaded from the model directory.

        Raises:
            CheckpointError: the state is of another model or optimizer, or damaged.
        """
        if self._optimizer is None:
            raise RuntimeError("this model was built without an optimizer")
        storage = Storage(location) / optimizer_folder(name)
        try:
            load_state(self._model, self._optimizer, storage)
            if self._loss_scale is not None:
                vars(self._loss_scale).update(read_index(storage).values.get(_LOSS_SCALE, {}))
            if self._average is not None:
                self._load_average(self._average, storage)
        except OSError as error:
            raise CheckpointError(f"'{storage}' cannot be read: {error}", where="trainer.resume_from_path") from error

    def _load_average(self, average: WeightAverage, storage: Storage) -> None:
        tensors = _average_tensors(average)
        if any(name.startswith(AVERAGE) for name in read_index(storage).tensors):
            load_shards(tensors, storage)
        else:
            log.warning("'%s' has no average of the weights: optim.ema_decay begins at its weights", storage)


def _average_tensors(average: WeightAverage) -> dict[str, Tensor]:
    return {f"{AVERAGE}{name}": value for name, value in average.values.items()}


def optimizer_folder(name: str) -> str:
    """Return the folder of a model's optimizer state in a checkpoint."""
    return f"{name}_optimizer"

"""A model and its optimizer in a checkpoint: staged in memory, then written, and read back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from hone.errors import CheckpointError
from hone.models.loading import causal_lm
from hone.training.checkpoints.checksums import leave_checksums
from hone.training.checkpoints.optimizer_state import AVERAGE, load_state, named_state
from hone.training.checkpoints.shards import ShardStager, dist_rank, load_shards, read_index
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import in_layers, stage_layers, stage_weights
from hone.training.loss_scale import LossScale
from hone.training.weight_average import WeightAverage

_LOSS_SCALE = "loss_scale"

log = logging.getLogger("hone")


class ModelParts(Protocol):
    """A model whose parameters are divided over processes by their names."""

    @property
    def trained(self) -> list[str]:
        """Names of all trained parameters."""
        ...

    def layers(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all whole parameters by their names in files, or ``values`` in their places. Collective."""
        ...

    def everywhere(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of all processes. Collective."""
        ...


class ModelStager:
    """Stages the checkpoints of one model.

    Args:
        model: a Hugging Face model of any layout, adapters included.
        optimizer: of the trained parameters, or None.
        loss_scale: of the updates, or None.
        average: of the trained parameters, or None.
        stages: the pipeline stages of a model of which this process has a part; None if ``model`` is all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_scale: LossScale | None = None,
        average: WeightAverage | None = None,
        *,
        stages: ModelParts | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss_scale, self._average = model, optimizer, loss_scale, average
        self._stages = stages
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
        writes = [self._stage_weights(checkpoint / name, tokenizer, {})]
        if self._optimizer is not None:
            tensors, about = named_state(self._model, self._optimizer)
            if self._stages is not None:
                about |= {"trained": self._stages.trained, "state": self._stages.everywhere(about["state"])}
            if self._loss_scale is not None:
                about[_LOSS_SCALE] = dataclasses.asdict(self._loss_scale)
            if self._average is not None:
                tensors |= _average_tensors(self._average)
                writes.append(self._stage_weights(checkpoint / f"{name}_ema", tokenizer, self._average.values))
            writes.append(self._shards.stage(tensors, about, checkpoint / optimizer_folder(name)))
        rank = dist_rank()

        def write() -> None:
            while writes:  # frees what is written
                writes.pop(0)()
            leave_checksums(checkpoint, name, rank)

        return write

    def _stage_weights(
        self, folder: Storage, tokenizer: PreTrainedTokenizerBase | None, values: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """Copy the weights that this rank writes, with ``values`` in the places of parameters. Collective."""
        if self._stages is None:
            return stage_weights(self._model, folder, tokenizer, values=values)
        named = self._stages.layers(values)
        layers = [dict(named)] if isinstance(self._model, PeftModel) else in_layers(named, causal_lm(self._model))
        return stage_layers(layers, self._model, folder, tokenizer)

    def restore(self, location: str, name: str) -> None:
        """Load the optimizer state of a checkpoint of any layout; weights are loaded from the model directory.

        Raises:
            CheckpointError: the state is of another model or optimizer, or damaged.
        """
        if self._optimizer is None:
            raise RuntimeError("this model was built without an optimizer")
        storage = Storage(location) / optimizer_folder(name)
        try:
            names = None if self._stages is None else self._stages.trained
            load_state(self._model, self._optimizer, storage, names)
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

"""A model and its optimizer in a checkpoint: staged in memory, then written; and read back."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from hone.errors import CheckpointError
from hone.training.checkpoints.optimizer_state import load_state, named_state
from hone.training.checkpoints.shards import ShardStager
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import stage_weights


class ModelStager:
    """Stages one model time and again.

    Args:
        model: of Hugging Face, adapters included, of any layout.
        optimizer: of its trained parameters, or None.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._shards = ShardStager()

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy what this rank is to write; every rank calls it.

        Args:
            location: directory or URL of the checkpoint that is being written.
            name: "actor" or "critic".
            tokenizer: saved with the model.

        Returns:
            The writing: files only, no collective, from any thread, while the model is trained on.
        """
        checkpoint = Storage(location)
        writes = [stage_weights(self._model, checkpoint / name, tokenizer)]
        if self._optimizer is not None:
            tensors, about = named_state(self._model, self._optimizer)
            writes.append(self._shards.stage(tensors, about, checkpoint / _state_of(name)))

        def write() -> None:
            while writes:  # what is written need not be kept
                writes.pop(0)()

        return write

    def restore(self, location: str, name: str) -> None:
        """Take up the optimizer state of a checkpoint, saved by any layout; weights come with the model directory.

        Raises:
            CheckpointError: it is of another model or optimizer, or damaged.
        """
        if self._optimizer is None:
            raise RuntimeError("this model was built without an optimizer")
        storage = Storage(location) / _state_of(name)
        try:
            load_state(self._model, self._optimizer, storage)
        except OSError as error:
            raise CheckpointError(f"'{storage}' cannot be read: {error}", where="trainer.resume_from_path") from error


def _state_of(name: str) -> str:
    return f"{name}_optimizer"

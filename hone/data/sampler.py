"""Which rows come next: a shuffling sampler that can be stopped and resumed anywhere."""

from __future__ import annotations

from typing import Any

import torch

from hone.data.seeding import derive_seed
from hone.errors import DataError


class EpochSampler:
    """Batches of row indices, epoch after epoch; the rest of an epoch that fills no batch is left out.

    The order of an epoch depends on (seed, epoch) only, so the state is two numbers.

    Args:
        size: rows of the dataset.
        batch_size: rows a batch.
        shuffle: a new random order every epoch, or the order of the file.
        seed: run seed.

    Raises:
        DataError: the dataset does not fill one batch.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if size < batch_size:
            raise DataError(
                f"{size} rows do not fill one batch of {batch_size}",
                where="data.train_batch_size",
                why="training would have 0 steps",
                fix=f"data.train_batch_size={size}, or give more rows",
                code="R46",
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.epoch, self._position = 0, 0
        self._order = self._epoch_order()

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches an epoch."""
        return self.size // self.batch_size

    def next_batch(self) -> list[int]:
        """The next ``batch_size`` rows."""
        if self._position + self.batch_size > self.size:
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._epoch_order()
        start = self._position
        self._position += self.batch_size
        return self._order[start : self._position]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, and what they are positions in."""
        return {"epoch": self.epoch, "position": self._position, "size": self.size, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler stopped.

        Raises:
            DataError: the dataset has another number of rows now.
        """
        if state["size"] != self.size:
            raise DataError(
                f"the checkpoint was made with {state['size']} rows, the dataset now has {self.size}",
                where="data.train_files",
                why="the position in the data would mean other rows",
                fix="use the same files, or start a new run with trainer.experiment_name=...",
            )
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data", self.epoch))
        return torch.randperm(self.size, generator=generator).tolist()

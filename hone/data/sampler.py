"""Order in which dataset rows are visited: shuffled again every epoch, resumable at any batch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hone.data.seeding import derive_seed
from hone.errors import CheckpointError, DataError


class EpochSampler:
    """Endless batches of row numbers.

    Each epoch's order depends only on the seed and the epoch. The last rows that do not fill a batch are left out (other rows
    each epoch when shuffled).

    >>> sampler = EpochSampler(5, 2, shuffle=False, seed=0)
    >>> [sampler.next_batch() for _ in range(3)], sampler.epoch
    ([[0, 1], [2, 3], [0, 1]], 1)

    Raises:
        DataError: the dataset does not fill one batch.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size is {batch_size}", fix="data.train_batch_size=1 or more")
        if size < batch_size:
            raise DataError(
                f"the dataset has {size} rows, one batch needs {batch_size}",
                why="an incomplete batch is skipped, so an epoch would have 0 steps",
                fix=f"data.train_batch_size={size}, or more data" if size else "name a dataset with rows",
                code="R46",
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.epoch = 0
        """Epoch of the last returned batch (0 before the first)."""
        self._position = 0  # batches of this epoch already returned
        self._order = self._permutation(0)

    learns = False  # whether the order depends on the rates given to :meth:`observe`

    def observe(self, rates: Mapping[int, float]) -> None:
        """Receive the measured pass rate (0 to 1) of rows; this sampler ignores it."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the order at this step; a plain epoch has none."""
        return {}

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch; the last ``size % batch_size`` rows are left out."""
        return self.size // self.batch_size

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch, in a new epoch after the last batch of one."""
        start = self._count_batch() * self.batch_size
        return self._order[start : start + self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "batches": self._position,
            "size": self.size,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state`` with the batch that follows it.

        Raises CheckpointError: the state belongs to another dataset, batch size, order or seed.
        """
        self._check_run(state)
        if not 0 <= state["batches"] <= self.steps_per_epoch or state["epoch"] < 0:
            raise CheckpointError(f"the data position is not valid: epoch {state['epoch']}, batch {state['batches']}")
        self.epoch, self._position = state["epoch"], state["batches"]
        self._order = self._permutation(self.epoch)

    def _check_run(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if a state belongs to another dataset, batch size, order or seed."""
        for name, key in (
            ("size", "data.train_files"),
            ("batch_size", "data.train_batch_size"),
            ("shuffle", "data.shuffle"),
            ("seed", "data.seed (else trainer.seed)"),
        ):
            saved, present = state[name], getattr(self, name)
            if saved != present:
                raise CheckpointError(
                    f"the checkpoint's data position is for {name}={saved}, this run has {name}={present}",
                    why="some rows would be visited twice and others never",
                    fix=f"resume with the same {key}, or start again with trainer.resume_mode=disable",
                )

    def _count_batch(self) -> int:
        """Count a batch and return its number within the epoch; begin a new epoch after the last batch of one."""
        if self._position == self.steps_per_epoch:
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._permutation(self.epoch)
        self._position += 1
        return self._position - 1

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        # sorted by random(), the only method whose stream Python guarantees never to change
        generator = random.Random(derive_seed(self.seed, "data", epoch))
        keys = [generator.random() for _ in range(self.size)]
        return sorted(range(self.size), key=keys.__getitem__)

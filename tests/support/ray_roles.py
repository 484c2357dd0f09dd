"""Roles for tests of the Ray runtime; worker processes import this file."""

from __future__ import annotations

import os
from typing import Any

import torch

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, RemoteTensors, RowGroups, Split, dispatch
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ConfigError


class Prober:
    """Makes and reads batches, and says what it was sent."""

    def __init__(self, context: WorkerContext, length: int = 4) -> None:
        self.context, self.length = context, length

    @dispatch(Split.ROWS)
    def make(self, names: list[str]) -> Batch:
        """A row a name, of ``length`` tokens each."""
        tokens = torch.arange(len(names) * self.length).reshape(-1, self.length) % 97
        rows = [row + int(name) for row, name in zip(tokens, names, strict=True)]
        return Batch(
            {
                "uid": list(names),
                "prompt_ids": Ragged.from_rows([[int(name), 1] for name in names], torch.int64),
                "response_ids": Ragged.from_rows(rows, torch.int64),
                "note": [f"note {name}" for name in names],
            }
        )

    @dispatch(Split.ROWS)
    def double(self, batch: Batch) -> Batch:
        """Twice the tokens of every row."""
        assert "note" not in batch
        tokens = batch.ragged("response_ids")
        return Batch({"double": tokens.with_values(tokens.values * 2)})

    @dispatch(Split.ROWS, equal=True)
    def count(self, batch: Batch) -> Batch:
        """How many rows the rank of each row has."""
        return Batch({"count": torch.full((len(batch),), len(batch))})

    @dispatch(Split.ROWS, Collect.EACH)
    def parts(self, batch: Batch, groups: RowGroups) -> list[list[str]]:
        """The uids of each group's rows on each worker."""
        return [[batch.uids[row] for row in group] for group in groups]

    @dispatch(Split.ROWS, sum)
    def tokens(self, batch: Batch) -> int:
        """Tokens of all rows."""
        return len(batch.ragged("response_ids").values)

    @dispatch(Split.ZERO, objects=True)
    def read(self, batch: Batch) -> dict[str, list[Any]]:
        """All of it, as lists."""
        return {n: c if isinstance(c := batch[n], list) else c.to_lists() if isinstance(c, Ragged) else c.tolist() for n in batch.names()}  # fmt: skip

    @dispatch(Split.ZERO)
    def total(self, batch: Batch) -> int:
        """The sum of the tokens."""
        return int(batch.ragged("response_ids").values.sum())

    @dispatch(Split.RANKS)
    def ranked(self, number: int) -> tuple[int, int]:
        """The worker's rank, and what it was given."""
        return self.context.rank, number

    @dispatch(Split.ALL, Collect.EACH)
    def where(self, name: str) -> tuple[int, str | None]:
        """Process and an environment variable."""
        return os.getpid(), os.environ.get(name)

    @dispatch(Split.ALL, Collect.EACH)
    def engine(self) -> tuple[int, tuple[str, ...] | None]:
        """The worker's rank, and the GPUs of the engine that it would start."""
        return self.context.rank, self.context.engine_devices

    @dispatch(Split.ALL, Collect.EACH, lenders=True)
    def gathered(self) -> tuple[int, tuple[str, ...] | None]:
        """The same of the workers that lend their device, too."""
        return self.engine()

    @dispatch(Split.ONE)
    def rank(self) -> int:
        """The worker's rank."""
        return self.context.rank

    @dispatch(Split.ALL, Collect.REMOTE)
    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Something to be kept out there."""
        return [("w", torch.arange(5.0))]

    @dispatch(Split.ALL, Collect.EACH)
    def take(self, weights: list[tuple[str, torch.Tensor]]) -> float:
        """What another has kept."""
        assert not isinstance(weights, RemoteTensors)
        return float(dict(weights)["w"].sum())

    @dispatch(Split.ZERO)
    def fail(self, kind: str) -> None:
        """Raise what a user can mend, or a bug."""
        if kind == "mistake":
            raise ConfigError("the number 3 is wrong", why="because", fix="a=4", code="R99")
        raise KeyError("a bug")

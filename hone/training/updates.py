"""Inputs and results of an optimizer update: loss function, totals of a mini-batch, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.batch import Batch
from hone.data.ragged import Ragged


@dataclass(frozen=True)
class Totals:
    """Counts over a whole mini-batch. Every micro-batch normalises by them, so the division into micro-batches has no
    effect.
    """

    tokens: int  # response tokens with mask 1
    sequences: int  # rows with at least one such token

    @classmethod
    def from_batch(cls, batch: Batch) -> Totals:
        """Count column ``response_mask``."""
        mask = batch.ragged("response_mask")
        sums = torch.zeros(len(batch)).index_add_(
            0, torch.arange(len(batch)).repeat_interleave(mask.lengths), mask.values.float().cpu()
        )
        return cls(int(sums.sum()), int((sums > 0).sum()))


Statistics = dict[str, tuple[Tensor | float, float]]  # metric name to (value, weight) of one micro-batch

LossFn = Callable[[dict[str, Ragged], Batch, Totals], tuple[Tensor, Statistics]]
"""(outputs of the head, micro-batch, totals) to (this micro-batch's share of the loss, statistics)."""


class PartialLoss:
    """Loss function of a mini-batch that comes in parts.

    The loss of a part is normalised by the totals of the part. It is weighted by them, so that the gradients of all
    parts add up to those of the whole mini-batch, times a known factor. ``count``: function of totals that returns the
    number by which the loss is divided; None if it is a sum.
    """

    def __init__(self, loss_fn: LossFn, count: Callable[[Totals], int] | None) -> None:
        self._loss_fn, self._count = loss_fn, count
        self.statistics: list[Statistics] = []
        self._first = self._part = self._total = 0

    def begin_part(self, totals: Totals) -> None:
        if self._count is not None:
            self._part = self._count(totals)
            self._first = self._first or self._part
            self._total += self._part

    def __call__(self, outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        loss, statistics = self._loss_fn(outputs, batch, totals)
        return loss if self._count is None else loss * (self._part / self._first), statistics

    @property
    def scale(self) -> float:
        """Factor from the accumulated gradients to those of the mini-batch."""
        return self._first / self._total if self._total else 1.0


@dataclass(frozen=True)
class GatheredRows:
    """The rows of a mini-batch from all data-parallel ranks."""

    batch: Batch  # all rows, in the order of the ranks
    local: Sequence[int]  # indices of this rank's rows


GatherRows = Callable[[Batch], GatheredRows]  # function from this rank's rows to the rows of all ranks. Collective


@dataclass
class UpdateResult:
    """Result of one optimizer update."""

    grad_norm: float  # before clipping
    statistics: list[Statistics]  # of each micro-batch of all data-parallel ranks, in order
    applied: bool  # False if the gradient was not finite and the update was skipped
    loss_scale: float | None = None  # factor of the loss in the backward pass
    overflow: bool = False  # skipped because the scaled gradient left float16's range; the next scale is smaller

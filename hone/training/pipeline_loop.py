"""The loop over the micro-batches of a model in pipeline stages, for backends that divide layers.

    stage 0   embedding, first layers      micro-batches enter one after the other
    ...                                    hidden states go forward, their gradients backward
    last      last layers, head, loss      each forward pass is followed by the backward pass of an earlier micro-batch (1F1B)

All stages of a pipeline have the same rows. The last stage sends outputs and statistics to the others, so that every rank returns them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import Head
from hone.training.engine import Forward, MicroBatchLoop, Outputs, TrainSettings, micro_batch_loss
from hone.training.objectives import LossFn, Statistics, Totals
from hone.training.optimizer import LossScale
from hone.training.ranks import RankGroup

MicroBatch = tuple[list[int], Batch]
LossOf = Callable[[list[int], Batch, dict[str, Tensor]], Tensor]
"""(indices of the rows, rows, outputs of the head) to the loss of a micro-batch."""


class PipelineLoop(MicroBatchLoop, ABC):
    """Runs batches through a pipeline of stages, with or without gradient; ``forward`` is that of the last stage and
    its head.
    """

    def __init__(
        self,
        forward: Forward,
        settings: TrainSettings,
        *,
        pipeline: ProcessGroup,
        ranks: RankGroup,
        cost: CostModel,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(forward, settings, ranks=ranks, cost=cost, loss_scale=loss_scale)
        self._pipeline = pipeline

    @abstractmethod
    def run(
        self, micro_batches: list[MicroBatch], head: Head, with_entropy: bool, loss_of: LossOf, *, train: bool
    ) -> None:
        """Take the micro-batches through the stages; the last stage passes the head's outputs to ``loss_of``.
        Collective. With ``train``, gradients of the losses accumulate in the parameters. Collective.
        """

    def infer(
        self, batch: Batch, head: Head, *, with_entropy: bool = False, max_tokens: int | None = None
    ) -> dict[str, Ragged]:
        outputs = Outputs(batch.ragged("response_ids"))

        def keep(rows: list[int], micro: Batch, values: dict[str, Tensor]) -> Tensor:
            outputs.add(rows, values)
            return torch.zeros((), device=self._device)

        micro_batches = self._parts(batch, max_tokens or self._settings.max_tokens)
        with torch.no_grad():
            self.run(micro_batches, head, with_entropy, keep, train=False)
        return self._from_last(outputs.columns())

    def _accumulate(
        self,
        batch: Batch,
        head: Head,
        loss_fn: LossFn,
        totals: Totals,
        with_entropy: bool,
        outputs_seen: Outputs | None,
    ) -> list[Statistics]:
        statistics: list[Statistics] = []
        seen: list[tuple[list[int], dict[str, Tensor]]] = []
        factor = 1.0 if self._loss_scale is None else self._loss_scale.value

        def loss_of(rows: list[int], micro: Batch, values: dict[str, Tensor]) -> Tensor:
            if outputs_seen is not None:
                seen.append((rows, {name: value.detach().cpu() for name, value in values.items()}))
            loss, micro_statistics = micro_batch_loss(rows, micro, values, loss_fn, totals)
            statistics.extend(_plain(one) for one in micro_statistics)
            return loss if factor == 1.0 else loss * factor

        self.run(self._parts(batch, self._settings.max_tokens), head, with_entropy, loss_of, train=True)
        statistics, seen = self._from_last((statistics, seen))
        if outputs_seen is not None:
            for rows, values in seen:
                outputs_seen.add(rows, values)
        return statistics

    def _parts(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """Return all micro-batches; images, which no pipeline has, are left out."""
        return [(rows, micro) for rows, micro, _ in self.micro_batches(batch, max_tokens)]

    def _from_last(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(
            values, group=self._pipeline, group_src=self._pipeline.size() - 1, device=self._device
        )
        return values[0]


def _plain(statistics: Statistics) -> Statistics:
    """Return statistics as numbers, without their graphs."""
    return {name: (float(value), float(weight)) for name, (value, weight) in statistics.items()}

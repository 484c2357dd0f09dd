"""Loop over the micro-batches of a model in pipeline stages, by Megatron's schedule.

    stage 0   embedding, first layers      micro-batches enter one after the other
    ...                                    hidden states go forward, their gradients backward
    last      last layers, head, loss      each forward pass is followed by the backward pass of an earlier micro-batch (1F1B)

All stages of a pipeline have the same rows. The last stage sends outputs and statistics to the others, so that every rank returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight import activity
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups
from hone.training.backends.megatron.model import Stage
from hone.training.engine import MicroBatchLoop, TrainSettings, micro_batch_loss
from hone.training.packing import pack
from hone.training.ranks import RankGroup
from hone.training.updates import LossFn, Outputs, Statistics, Totals

MicroBatch = tuple[list[int], Batch]


class PipelineLoop(MicroBatchLoop):
    """Runs batches through a pipeline of stages, with or without gradient.

    Args:
        stage: of this rank.
        chunk: the stage with its gradient reduction; None if it is not trained.
        groups: process groups.
        settings: budget, device and dtype.
        ranks: the data-parallel ranks that share each mini-batch.
        cost: cost model of a sequence.
    """

    def __init__(
        self,
        stage: Stage,
        chunk: DistributedDataParallel | None,
        groups: Groups,
        settings: TrainSettings,
        *,
        ranks: RankGroup,
        cost: CostModel,
    ) -> None:
        super().__init__(_outputs(stage), settings, ranks=ranks, cost=cost)
        self._stage, self._chunk, self._groups = stage, chunk, groups
        self._communicator = P2PCommunicator(groups.pipeline, stage.config)

    def infer(
        self, batch: Batch, head: Head, *, with_entropy: bool = False, max_tokens: int | None = None
    ) -> dict[str, Ragged]:
        """Run the forward pass without gradient; every stage returns the columns."""
        outputs = Outputs(batch.ragged("response_ids"))

        def keep(rows: list[int], micro: Batch, values: dict[str, Tensor]) -> Tensor:
            outputs.add(rows, values)
            return torch.zeros((), device=self._device)

        with torch.no_grad():
            self._run(batch, head, with_entropy, keep, max_tokens=max_tokens or self._settings.max_tokens, train=False)
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

        def loss_of(rows: list[int], micro: Batch, values: dict[str, Tensor]) -> Tensor:
            if outputs_seen is not None:
                seen.append((rows, {name: value.detach().cpu() for name, value in values.items()}))
            loss, micro_statistics = micro_batch_loss(rows, micro, values, loss_fn, totals)
            statistics.extend(_plain(one) for one in micro_statistics)
            return loss

        self._run(batch, head, with_entropy, loss_of, max_tokens=self._settings.max_tokens, train=True)
        statistics, seen = self._from_last((statistics, seen))
        if outputs_seen is not None:
            for rows, values in seen:
                outputs_seen.add(rows, values)
        return statistics

    def _run(
        self,
        batch: Batch,
        head: Head,
        with_entropy: bool,
        loss_of: Callable[[list[int], Batch, dict[str, Tensor]], Tensor],
        *,
        max_tokens: int,
        train: bool,
    ) -> None:
        """Take the micro-batches through the stages; the last stage passes the head's outputs to ``loss_of``."""
        micro_batches = list(self.micro_batches(batch, max_tokens))

        def step(remaining: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]] | None]:
            del model  # the gradient reduction around the stage
            rows, micro = next(remaining)
            packed = pack(micro, self._device)
            activity.tick()
            with autocast(self._device, self._settings.dtype):
                if not self._groups.last_stage:
                    return self._stage(packed), None
                outputs = packed.outputs_by_row(self._forward(head, packed, with_entropy))
            loss = loss_of(rows, micro, outputs)
            return loss, lambda loss: (loss, torch.zeros((), dtype=torch.int, device=self._device), None)

        with self.computing(), on_device(self._device):
            forward_backward_pipelining_without_interleaving(
                forward_step_func=step,
                data_iterator=iter(micro_batches),
                model=self._stage if self._chunk is None else self._chunk,
                num_microbatches=len(micro_batches),
                seq_length=1,  # shapes are sent before hidden states
                micro_batch_size=1,
                forward_only=not train,
                p2p_communicator=self._communicator,
                pg_collection=self._groups.collection,
            )

    def _from_last(self, value: Any) -> Any:
        """Return the value of the last stage on every stage."""
        values = [value]
        last = self._groups.pipeline.size() - 1
        dist.broadcast_object_list(values, group=self._groups.pipeline, group_src=last, device=self._device)
        return values[0]


def _outputs(stage: Stage) -> Callable[[Head, PackedSequences, bool], dict[str, Tensor]]:
    """Return the forward pass of the last stage."""
    return lambda head, packed, with_entropy: head(stage, packed, with_entropy=with_entropy)


def _plain(statistics: Statistics) -> Statistics:
    """Return statistics as numbers, without their graphs."""
    return {name: (float(value), float(weight)) for name, (value, weight) in statistics.items()}

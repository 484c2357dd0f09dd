"""Megatron's schedule of the micro-batches of a model in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from hone.data.balance import CostModel
from hone.insight import activity
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups
from hone.training.backends.megatron.model import Stage
from hone.training.engine import TrainSettings
from hone.training.packing import pack
from hone.training.pipeline_loop import LossOf, MicroBatch, PipelineLoop
from hone.training.ranks import RankGroup


class MegatronPipelineLoop(PipelineLoop):
    """Runs batches through a pipeline of Megatron's stages, with or without gradient.

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
        super().__init__(_outputs(stage), settings, pipeline=groups.pipeline, ranks=ranks, cost=cost)
        self._stage, self._chunk, self._groups = stage, chunk, groups
        self._communicator = P2PCommunicator(groups.pipeline, stage.config)

    def run(
        self, micro_batches: list[MicroBatch], head: Head, with_entropy: bool, loss_of: LossOf, *, train: bool
    ) -> None:
        """Take the micro-batches through the stages; see :meth:`PipelineLoop.run`."""

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


def _outputs(stage: Stage) -> Callable[[Head, PackedSequences, bool], dict[str, Tensor]]:
    """Return the forward pass of the last stage."""
    return lambda head, packed, with_entropy: head(stage, packed, with_entropy=with_entropy)

"""The schedule of micro-batches through the pipeline stages of a sharded model, by ``torch.distributed.pipelining``.

torch's schedules send tensors of one shape, and packed micro-batches differ in length: hidden states are padded to the longest of the
micro-batches of a call. Gradients stay whole in each stage until the last micro-batch, when FSDP reduces them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hone.data.balance import CostModel
from hone.insight import activity
from hone.models.compiled import CompiledLayers
from hone.models.experts import ExpertRouters
from hone.models.heads import Head, autocast, decoder_inputs, reads_targets
from hone.models.inputs import PackedSequences
from hone.models.loading import causal_lm
from hone.training.backends.fsdp2.sequence_parallel import gather_outputs, local_tokens
from hone.training.backends.fsdp2.stages import Stages
from hone.training.engine import TrainSettings
from hone.training.layout import Meshes
from hone.training.optimizer import LossScale
from hone.training.packing import pack
from hone.training.pipeline_loop import LossOf, MicroBatch, PipelineLoop
from hone.training.ranks import RankGroup


class Computation(nn.Module):
    """A model with its head's computation as one module.

    FSDP gathers parameters at the call of a module, but a head calls submodules of a model, never the model itself.
    """

    def __init__(self, model: nn.Module, meshes: Meshes, routers: ExpertRouters | None = None) -> None:
        super().__init__()
        self.model, self.meshes, self.routers = model, meshes, routers
        self.compiled: CompiledLayers | None = None

    def forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        """Return the head's outputs for the whole packed row, on every rank that shares it."""
        local, indices = self.local(head, packed)
        if self.compiled is not None:
            local = self.compiled.traceable(local)
        if self.routers is not None:
            self.routers.follow(local.experts)
        return self.outputs(head, local, indices, len(packed.targets), with_entropy)

    def local(self, head: Head, packed: PackedSequences) -> tuple[PackedSequences, Tensor | None]:
        """Return this rank's tokens of a row, with the indices of their outputs; None for the whole row."""
        if self.meshes.layout.ranks_a_row == 1:
            return packed, None
        return local_tokens(packed.at_targets() if reads_targets(head) else packed, self.meshes)

    def outputs(
        self, head: Head, packed: PackedSequences, indices: Tensor | None, total: int, with_entropy: bool
    ) -> dict[str, Tensor]:
        """Return the head's outputs for the whole row, on every rank that shares it."""
        outputs = head(self.model, packed, with_entropy=with_entropy)
        if indices is None:
            return outputs
        group = self.meshes.row_group
        return {name: gather_outputs(values, indices, total, group) for name, values in outputs.items()}


class StageComputation(Computation):
    """The computation of this rank's stage, which torch's schedule calls. ``dtype``: of the hidden states between stages."""

    def __init__(self, model: nn.Module, meshes: Meshes, stages: Stages, dtype: torch.dtype) -> None:
        super().__init__(model, meshes)  # without routers: the experts of other stages are not counted
        self.stages, self.dtype = stages, dtype
        self.step: Callable[..., Tensor] | None = None

    def forward(self, *arriving: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the step of the next micro-batch; ``arriving`` has the hidden states of the stage before."""
        assert self.step is not None
        return self.step(*arriving)

    def hidden_states(self, packed: PackedSequences) -> Tensor:
        """Return the hidden states ``[1, n, H]`` after this stage's layers."""
        decoder: Any = causal_lm(self.model).get_decoder()
        return decoder(**decoder_inputs(packed)).last_hidden_state


class Fsdp2PipelineLoop(PipelineLoop):
    """Runs batches through a pipeline of sharded stages, with or without gradient."""

    def __init__(
        self,
        computation: StageComputation,
        settings: TrainSettings,
        *,
        ranks: RankGroup,
        cost: CostModel,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(
            computation, settings, pipeline=computation.stages.group, ranks=ranks, cost=cost, loss_scale=loss_scale
        )
        self._computation = computation

    def run(
        self, micro_batches: list[MicroBatch], head: Head, with_entropy: bool, loss_of: LossOf, *, train: bool
    ) -> None:
        computation, stages = self._computation, self._computation.stages
        whole = [pack(micro, self._device) for _, micro in micro_batches]
        parts = [computation.local(head, packed) for packed in whole]
        longest = max(packed.input_ids.shape[1] for packed, _ in parts)
        remaining = iter(zip(micro_batches, whole, parts, strict=True))

        def step(*arriving: Tensor) -> Tensor:
            (rows, micro), row, (packed, indices) = next(remaining)
            tokens = packed.input_ids.shape[1]
            if not stages.is_first:
                packed = dataclasses.replace(packed, hidden=arriving[0][:, :tokens])
            activity.tick()
            with autocast(self._device, self._settings.dtype):
                if not stages.is_last:
                    hidden = computation.hidden_states(packed).to(computation.dtype)
                    return F.pad(hidden, (0, 0, 0, longest - tokens))
                outputs = computation.outputs(head, packed, indices, len(row.targets), with_entropy)
                outputs = row.outputs_by_row(outputs)
            return loss_of(rows, micro, outputs)

        computation.step = step
        try:
            with self.computing():
                self._schedule(longest, len(micro_batches), train=train)
        finally:
            computation.step = None

    def _schedule(self, longest: int, count: int, *, train: bool) -> None:
        """Run torch's schedule over ``count`` micro-batches of ``longest`` tokens."""
        stages = self._computation.stages
        width = causal_lm(self._computation.model).config.get_text_config().hidden_size
        hidden = torch.empty(1, longest, width, dtype=self._computation.dtype, device="meta", requires_grad=train)
        loss = torch.empty((), device="meta", requires_grad=train)
        stage = PipelineStage(
            self._computation,
            stages.index,
            stages.count,
            self._device,
            input_args=() if stages.is_first else (hidden,),
            output_args=(loss,) if stages.is_last else (hidden,),
            group=stages.group,
        )
        kind = Schedule1F1B if train and count >= stages.count else ScheduleGPipe
        schedule = kind(stage, count, loss_fn=_loss if train else None, scale_grads=False)
        target = torch.zeros(count) if train and stages.is_last else None
        schedule.step(target=target, return_outputs=False)


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return output

"""Pipeline stages of consecutive layers of a sharded model, and the schedule of micro-batches through them.

Every rank builds the whole Hugging Face model without storage, then cuts away what other stages have. Names stay those of the whole
model, so that files, exports and checkpoints do not depend on the number of stages:

    first stage    embedding, layers 0 to k
    last stage     last layers, final norm, output layer; and a copy of the embedding if the output layer is tied to it

The schedule is that of ``torch.distributed.pipelining``.

torch's schedules send tensors of one shape, and packed micro-batches differ in length: hidden states are padded to the longest of the
micro-batches of a call. Gradients stay whole in each stage until the last micro-batch, when FSDP reduces them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.data.balance import CostModel
from hone.errors import ModelError
from hone.insight import activity
from hone.models.compiled import CompiledLayers
from hone.models.experts import ExpertRouters
from hone.models.heads import Head, autocast, decoder_inputs, reads_targets
from hone.models.inputs import PackedSequences
from hone.models.loading import causal_lm, layers_of
from hone.models.tied import parts_embeddings
from hone.training.backends.fsdp2.pipeline_models import require_divisible
from hone.training.backends.fsdp2.sequence_parallel import gather_outputs, local_tokens
from hone.training.engine import TrainSettings
from hone.training.export_stream import STREAMS, in_buckets, in_dtype
from hone.training.layout import Meshes
from hone.training.optimizer import LossScale
from hone.training.packing import pack
from hone.training.pipeline_loop import LossOf, MicroBatch, PipelineLoop
from hone.training.ranks import RankGroup

_OUTPUTS = ("lm_head", "score", "classifier")


class Elsewhere(nn.Module):
    """The place of a layer that another stage has; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # decoders choose a mask by it

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model."""

    name: str
    meta: Tensor  # shape and dtype, without storage
    stage: int  # the first that has it
    trained: bool
    file_name: str | None  # in a checkpoint; None if it is not saved


class Stages:
    """The stages of one model, and what this rank has.

    ``model``: whole, without storage, with its adapters. ``shared``: the tied embedding, which the first and the last
    stage have; None on other stages and without one.

    Raises ModelError: the model cannot be divided into as many stages.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
        inner = causal_lm(model)
        self.model, self.group, self.device = model, group, device
        self.index, self.count = dist.get_rank(group), group.size()
        require_divisible(inner.config.to_dict(), self.count, str(inner.name_or_path))
        self._layers = {name: number for number, name in enumerate(_layer_names(inner))}
        if parts_embeddings(model):
            raise ModelError(
                "the adapter changes one of two tied embeddings, which pipeline stages hold as one matrix",
                why="the weights sent and saved would be those of another model",
                fix="no pipeline stages, or an adapter without lm_head and embed_tokens: target_modules=all-linear",
                where="model.target_modules",
            )
        tied = _tied(inner)
        self.parameters = [
            WholeParameter(name, meta, self._stage_of(name), meta.requires_grad, saved)
            for (name, meta), saved in zip(_metas(model), _file_names(model), strict=True)
        ]
        self._cut(inner, tied)
        embedding = inner.get_input_embeddings() if tied and self.index in (0, self.count - 1) else None
        self.shared_module = embedding if isinstance(embedding, nn.Module) else None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def shared(self) -> nn.Parameter | None:
        return None if self.shared_module is None else self.shared_module.get_parameter("weight")

    @property
    def trained(self) -> list[str]:
        return [parameter.name for parameter in self.parameters if parameter.trained]

    def export(self, which: str, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of all stages, as :mod:`hone.training.export_stream` does for a whole model. Collective."""
        wanted: list[tuple[str, Tensor, int]] = []
        inner = causal_lm(self.model)
        prefix = next((name for name, module in self.model.named_modules() if module is inner), "")
        for parameter in self.parameters:
            name = parameter.name
            if which == "merged":
                name = name.removeprefix(f"{prefix}." if prefix else "").replace(".base_layer.", ".")
            if {"all": True, "adapter": ".lora_" in name, "merged": ".lora_" not in name}[which]:
                wanted.append((name, in_dtype(parameter.meta, dtype), parameter.stage))
        yield from self._from_owners(wanted, lambda: STREAMS[which](self.model, dtype=dtype))

    def layers(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters (or ``values``) of all stages by their names in a checkpoint's files. Collective."""
        names = {parameter.name: parameter.file_name for parameter in self.parameters}
        wanted = [(p.name, p.meta, p.stage) for p in self.parameters if p.file_name is not None]
        local = {**dict(self.model.named_parameters()), **values}
        for name, value in self._from_owners(wanted, lambda: in_buckets(local.items())):
            yield str(names[name]), value

    def everywhere(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values of the parameters of all stages. Collective."""
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, dict(values), group=self.group)
        return {name: value for part in reversed(gathered) for name, value in part.items()}

    def add_shared_gradient(self) -> None:
        """Add up the gradients of the tied embedding, which the first and the last stage have."""
        if self.shared is None or self.shared.grad is None:
            return
        grad = self.shared.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        received = torch.empty_like(local)
        peer = dist.get_global_rank(self.group, self.count - 1 if self.is_first else 0)
        exchange = [
            dist.P2POp(dist.isend, local.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, received, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        local.add_(received)

    def _from_owners(self, wanted: list[tuple[str, Tensor, int]], local: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors in the order of the model: each stage gathers its own and sends them to the others."""
        for stage in range(self.count):
            names = {name: meta for name, meta, owner in wanted if owner == stage}
            if stage == self.index:
                tensors = ((name, value) for name, value in local() if name in names)
            else:
                tensors = ((name, torch.empty_like(meta, device=self.device)) for name, meta in names.items())
            for name, value in tensors:
                value = value.contiguous()
                dist.broadcast(value, group_src=stage, group=self.group)
                yield name, value

    def _stage_of(self, name: str) -> int:
        """Return the first stage that has a parameter, by its name in the whole model."""
        for layer, number in self._layers.items():
            if f"{layer}." in f"{name}.":
                return self._stage_of_layer(number)
        return 0 if "embed_tokens" in name else self.count - 1

    def _stage_of_layer(self, number: int) -> int:
        return ((number + 1) * self.count - 1) // len(self._layers)

    def _cut(self, inner: PreTrainedModel, tied: bool) -> None:
        decoder: Any = inner.get_decoder()
        for name, number in self._layers.items():
            if self._stage_of_layer(number) != self.index:
                parent, _, child = name.rpartition(".")
                setattr(inner.get_submodule(parent), child, Elsewhere(inner.get_submodule(name)))
        if not self.is_last:
            decoder.norm = nn.Identity()
            for name in _OUTPUTS:
                if hasattr(inner, name):
                    setattr(inner, name, nn.Identity())
        if not (self.is_first or (self.is_last and tied)):
            decoder.embed_tokens = nn.Identity()


def _layer_names(inner: PreTrainedModel) -> list[str]:
    layers = layers_of(inner)
    return [name for name, module in inner.named_modules() if any(module is layer for layer in layers)]


def _tied(inner: PreTrainedModel) -> bool:
    output, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    return output is not None and getattr(output, "weight", None) is getattr(embedding, "weight", output)


def _metas(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names with shape, dtype and whether there is a gradient, without storage."""
    for name, parameter in model.named_parameters():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        yield name, meta.requires_grad_(parameter.requires_grad)


def _file_names(model: nn.Module) -> list[str | None]:
    """Return the name of each parameter in the files of a checkpoint; None for those that an adapter's files lack."""
    metas = dict(_metas(model))
    if not isinstance(model, PeftModel):
        return list(metas)
    saved = {id(meta): name for name, meta in get_peft_model_state_dict(model, state_dict=dict(metas)).items()}
    return [saved.get(id(meta)) for meta in metas.values()]


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
        if self.routers is not None:
            outputs |= self.routers.take_kept(packed)
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
